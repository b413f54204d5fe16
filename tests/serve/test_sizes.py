"""The service shares its loop with the run: what grows with a request does not stop it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter

from rollyard.caller import Batch
from rollyard.errors import WeightSyncError
from rollyard.prompts.given import GivenSource
from rollyard.prompts.source import Row
from rollyard.rollouts import Rollouts
from rollyard.serve import choices, records, service, store, weights
from rollyard.serve.group import Groups, Offer
from rollyard.serve.refusals import Refused
from rollyard.serve.routes import training
from rollyard.types import FinishReason, Reply, TensorInfo, VersionSpan
from tests.serve.double import V0, batch, group, serving


class Measured(str):
    """A text that knows how often it was measured."""

    times = 0

    def __len__(self) -> int:
        Measured.times += 1
        return super().__len__()


def test_each_token_of_an_answer_is_measured_once() -> None:
    ids = (0, 1, 2) * 100
    session: Any = SimpleNamespace(ask=SimpleNamespace(decode=lambda tokens: Measured("x" * tokens[0])))
    reply = Reply(ids, "", FinishReason.STOP, (-1.0,) * len(ids), (VersionSpan(V0, V0, len(ids)),))
    found = choices._text_logprobs(session, reply)
    assert found.text_offset[:7] == [0, 0, 1, 3, 3, 4, 6] and found.text_offset[-1] == 298
    assert Measured.times <= len(ids)
    assert choices._text_logprobs(session, Reply((), "", FinishReason.LENGTH, (), ())).text_offset == []


async def test_the_document_is_made_before_the_first_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        assert served.app._app.openapi_schema


async def test_an_upload_is_written_and_hashed_in_large_pieces_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients send what a socket takes at a time: 64 KiB."""
    pieces, threads, write = [bytes([number]) * 2**16 for number in range(200)], list[int](), weights._keep

    def keep(piece: bytes, *more: Any) -> None:
        threads.append(threading.get_ident())
        write(piece, *more)

    async def coming() -> AsyncIterator[bytes]:
        for piece in pieces:
            yield piece

    monkeypatch.setattr(weights, "_keep", keep)
    came = await weights.receive(coming(), tmp_path / "w", 2**30, 5.0)
    assert came.path.read_bytes() == b"".join(pieces) and came.digest == sha256(b"".join(pieces)).hexdigest()
    assert len(threads) <= 4 and threading.get_ident() not in threads


async def test_a_group_is_made_json_once_and_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes as finished, and in its batch."""
    made, kept = list[tuple[int, int]](), service._kept

    def keep(outcome: Any) -> tuple[int, bytes]:
        made.append((outcome.id, threading.get_ident()))
        return kept(outcome)

    monkeypatch.setattr(service, "_kept", keep)
    async with serving(tmp_path) as served:
        lease, finished = await served.lease(), [group(5), group(6), group(7)]
        for each in finished[:2]:
            served.run.found.put_nowait(each)
        await served.http.get("/v1/groups", params={"after": 1, "wait_s": 5})
        served.run.batch.put_nowait(Batch(0, tuple(finished), batch(0, 5, 6, 7).train))  # where one is told of first
        assert (await served.http.get("/v1/batch", params={"wait_s": 5}, headers=lease)).status_code == 200
        told = (await served.http.get("/v1/groups")).json()["groups"]
        assert [each["group"]["prompt"]["id"] for each in told] == [5, 6, 7]
        served.run.found.put_nowait(finished[2])
        served.run.found.put_nowait(group(5, reward=0.0))  # written anew
        await served.http.get("/v1/groups", params={"after": 3, "wait_s": 5})
    assert [id_ for id_, _ in made] == [5, 6, 7, 5]
    assert threading.get_ident() not in {thread for _, thread in made}


def test_a_batch_is_made_json_in_pieces_beside_the_loop() -> None:
    """Making one piece cannot be interrupted."""
    out = batch(0, 5, 6, 7)
    pieces = list(training.json_of(out))
    assert b"".join(pieces) == TypeAdapter(Batch).dump_json(out) and len(pieces) > len(out.groups)


async def test_pages_of_a_stream_are_bounded_in_bytes_and_keep_no_writer_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "PAGE", 100)
    held = store.Store(tmp_path)
    try:
        await held.keep([(id_, b"x" * size) for id_, size in enumerate((40, 40, 40, 500, 40))])
        pages, after = [], 0
        while found := await held.outcomes(after, 64):
            pages.append([cursor for cursor, _ in found])
            after = found[-1][0]
        assert pages == [[1, 2], [3], [4], [5]]
        may, began = threading.Event(), threading.Event()
        reading = held._readers.submit(lambda: (began.set(), may.wait(20)))
        began.wait(20)
        page = asyncio.create_task(held.outcomes(0, 64))
        await asyncio.wait_for(held.promise("", 0, [b"?"]), 10)
        assert not page.done() and not reading.done()
        may.set()
        assert len(await page) == 2
    finally:
        held.close()


async def test_prompts_are_made_once_and_beside_the_loop(tmp_path: Path) -> None:
    threads = list[int]()

    def render(number: int, row: Row) -> tuple[tuple[int, ...], str]:
        threads.append(threading.get_ident())
        return (4,), str(row.prompt)

    async with serving(tmp_path) as served:
        served.run.source._render = render
        told = await served.http.post("/v1/prompts", json={"prompts": [{"text": "?"}] * 3})
        assert told.json() == {"ids": [0, 1, 2]}
    assert len(threads) == 3 and threading.get_ident() not in threads
    rollouts = Rollouts.__new__(Rollouts)  # whose run has begun
    source = GivenSource(render, 8, str)
    rollouts._caller = SimpleNamespace(source=source, over=None, check_takes=lambda: None)  # type: ignore[assignment]
    rollouts._suits = lambda columns: None  # type: ignore[assignment]
    made = await rollouts.make(["?", "?"])
    assert rollouts.put(await rollouts.make(["first"])) == (0,) and rollouts.put(made) == (1, 2)
    assert [(each.id, each.row, each.text) for each in source.take(9)[0]] == [(0, 0, "first"), (1, 1, "?"), (2, 2, "?")]
    assert len(threads) == 6 and threading.get_ident() not in threads


async def test_a_submission_is_looked_at_beside_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, look = list[int](), records.given

    def looked(prompts: Sequence[Any]) -> list[Any]:
        threads.append(threading.get_ident())
        return look(prompts)

    monkeypatch.setattr(records, "given", looked)
    submission = records.Submission.model_validate({"prompts": [{"text": ""}, 3]})
    assert submission.prompts == [{"text": ""}, 3], "not yet"
    async with serving(tmp_path) as served:
        told = await served.http.post("/v1/prompts", json={"prompts": [{"text": "?"}, {"token_ids": [1, 2.0]}]})
        assert told.json() == {"ids": [0, 1]}
        told = await served.http.post("/v1/prompts", json={"prompts": [{"text": "?"}, {"text": "?", "columns": 3}]})
        assert told.status_code == 400 and told.json()["error"]["param"].startswith("prompts.1."), told.text
    assert len(threads) == 2 and threading.get_ident() not in threads


async def test_an_invitation_that_was_not_heard_is_no_second_group(tmp_path: Path) -> None:
    """Nothing is held for a trainer that has not come, and nobody waits for one that is not expected any more."""
    meeting, wanted = Groups("127.0.0.1", limit_s=60.0), (TensorInfo("a", (2,), "torch.float32"),)

    def waiting() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "meeting"} - before

    before = {thread for thread in threading.enumerate() if thread.name == "meeting"}
    first = Offer("lease", 1, wanted, {"loss": 0.5})
    invited = [meeting.invite(first, wanted) for _ in range(5)]
    assert len(set(invited)) == 1 and len(waiting()) == 1
    (coming,) = meeting._coming.values()
    assert not coming.tensors
    other = meeting.invite(Offer("other", 1, wanted, {"loss": 0.5}), wanted)
    with pytest.raises(WeightSyncError, match="did not come"):
        await asyncio.wait_for(coming.done, 10)
    assert other not in invited
    with pytest.raises(Refused, match="no such group"):
        await meeting.arrived(invited[0].name, 1)
    (coming,) = meeting._coming.values()
    meeting.close()
    with pytest.raises(WeightSyncError, match="did not come"):
        await asyncio.wait_for(coming.done, 10)


DEEP: Any = json.loads("[" * 100 + "]" * 100)


@pytest.mark.parametrize("columns", [{"a": "\ud800"}, {"a": {"\ud800": None}}, {"\ud800": 1}, {"a": DEEP}])
def test_what_its_readers_could_not_read_is_refused_wherever_it_is(columns: dict[str, object]) -> None:
    with pytest.raises(RequestValidationError):
        records.given([{"text": "?"}, {"text": "?", "columns": columns}])
