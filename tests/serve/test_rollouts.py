"""Prompts come, groups go, batches go to one trainer, and weights come back."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import save

from rollyard.caller import Batch, Dropped
from rollyard.errors import ConfigError, JournalError, RunFailed
from rollyard.serve.store import Store
from rollyard.types import DropReason, Group
from tests.serve.double import batch, group, serving, until

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0, 4.0]])}


def calls(of: object, name: str) -> list[tuple[Any, ...]]:
    """Those of a method from now on: what a request asks for once it has come."""
    found, method = list[tuple[Any, ...]](), getattr(of, name)

    def noted(*given: Any) -> Any:
        found.append(given)
        return method(*given)

    setattr(of, name, noted)
    return found


async def test_prompts_are_submitted_once_under_a_key(tmp_path: Path) -> None:
    prompts = [{"text": "?", "columns": {"answer": "5"}}, {"token_ids": [1, 2]}]
    async with serving(tmp_path) as served:
        for _ in range(2):
            told = await served.http.post("/v1/prompts", json={"prompts": prompts, "key": "k"})
            assert (told.status_code, told.json()) == (202, {"ids": [0, 1]})
        told = await served.http.post("/v1/prompts", json={"prompts": prompts[:1], "key": "k"})
        assert told.status_code == 409 and told.json()["error"]["code"] == "key_used"
        assert (await served.http.post("/v1/prompts", json={"prompts": prompts})).json() == {"ids": [2, 3]}
        taken, _ = served.run.source.take(9)
    assert [(each.id, each.token_ids, dict(each.columns)) for each in taken] == [
        (0, (4,), {"answer": "5"}),
        (1, (1, 2), {}),
        (2, (4,), {"answer": "5"}),
        (3, (1, 2), {}),
    ]


async def test_what_was_accepted_is_asked_although_the_service_was_killed(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        await served.http.post("/v1/prompts", json={"prompts": [{"text": "?"}, {"text": "he"}], "key": "k"})
    async with serving(tmp_path) as served:  # whose run has not taken any
        assert [each.text for each in served.run.source.take(9)[0]] == ["?", "he"]
        again = await served.http.post("/v1/prompts", json={"prompts": [{"text": "?"}, {"text": "he"}], "key": "k"})
        assert again.json() == {"ids": [0, 1]} and not served.run.source.waiting


WRONG: list[object] = [
    {},
    {"prompts": []},
    {"prompts": [{}]},
    {"prompts": [{"text": "?", "token_ids": [1]}]},
    {"prompts": [{"text": 3}]},
    {"prompts": [{"token_ids": [99]}]},
    {"prompts": [{"text": "?", "columns": {"prompt": 1}}]},
    {"prompts": [{"text": "?"}], "more": 1},
    {"prompts": [{"text": "?"}], "wait_s": -1.0},
]


async def test_what_is_no_prompt_is_refused_as_a_whole(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        for wrong in WRONG:
            told = await served.http.post("/v1/prompts", json=wrong)
            assert told.status_code in (400, 422) and told.json()["error"]["message"], (wrong, told.text)
        assert not served.run.source.waiting and served.run.next_prompt == 0


async def test_a_text_by_itself_is_a_prompt(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        assert (await served.http.post("/v1/prompts", json={"prompts": ["?", {"text": "?"}]})).json() == {"ids": [0, 1]}
        taken, _ = served.run.source.take(9)
    assert [(each.token_ids, dict(each.columns)) for each in taken] == [((4,), {})] * 2


async def test_who_asks_wrongly_is_told_what_would_be_right(tmp_path: Path) -> None:
    kinds = "a prompt is a text, or an object with text, messages or token_ids"
    wrong: list[tuple[object, str]] = [
        (3, f"prompts.1: {kinds}"),
        ({"prompt": "?"}, f"prompts.1: {kinds}"),
        ("", "prompts.1.text: String should have at least 1 character"),
        ({"text": "?", "colums": {}}, "prompts.1.colums: Extra inputs are not permitted"),
        ({"messages": [{"role": "user"}]}, "prompts.1.messages.0.content: Field required"),
    ]
    async with serving(tmp_path) as served:
        for prompt, message in wrong:
            told = await served.http.post("/v1/prompts", json={"prompts": ["?", prompt]})
            assert (told.status_code, told.json()["error"]["message"]) == (400, message)
        for sent in ("", "application/x-www-form-urlencoded", "text/plain"):
            headers = {"content-type": sent} if sent else {}
            told = await served.http.post("/v1/prompts", content='{"prompts": ["?"]}', headers=headers)
            message = f"the body is sent as {sent or 'nothing'} (send JSON, with the header `Content-Type: application/json`)"
            assert (told.status_code, told.json()["error"]["message"]) == (400, message)
        for told in (await served.http.get("/v1/batch"), await served.http.post("/v1/trainer/renew")):
            message = "X-Rollyard-Lease is missing (POST /v1/trainer gives the lease)"
            assert (told.status_code, told.json()["error"]["message"]) == (400, message)
        assert not served.run.source.waiting


async def test_who_submits_too_much_is_told_to_wait_or_waits(tmp_path: Path) -> None:
    one = {"prompts": [{"text": "?"}]}
    async with serving(tmp_path, room=2) as served:
        assert [(await served.http.post("/v1/prompts", json=one)).status_code for _ in range(3)] == [202, 202, 429]
        told = await served.http.post("/v1/prompts", json=one)
        assert told.json()["error"]["code"] == "full" and int(told.headers["retry-after"]) > 0
        waiting = asyncio.create_task(served.http.post("/v1/prompts", json=one | {"wait_s": 5}))
        await until(lambda: served.run.rooms > 0)
        served.run.source.take(1)
        assert (await waiting).json() == {"ids": [2]}
        waiting = asyncio.create_task(served.http.post("/v1/prompts", json=one | {"wait_s": 0.05}))
        assert (await waiting).status_code == 429 and served.run.next_prompt == 3


async def test_what_the_run_did_not_take_is_not_promised(tmp_path: Path) -> None:
    one = {"prompts": [{"text": "?"}], "key": "k"}
    async with serving(tmp_path) as served:
        takes = served.run.put

        def ended(made: object) -> tuple[int, ...]:
            raise ConfigError("the run has ended", where="submit", remedy="begin another one")

        served.run.put = ended  # type: ignore[method-assign, assignment]
        for _ in range(2):
            assert (await served.http.post("/v1/prompts", json=one)).status_code == 422
        served.run.put = takes  # type: ignore[method-assign]
        assert (await served.http.post("/v1/prompts", json=one)).json() == {"ids": [0]}
        served.run.put = ended  # type: ignore[method-assign, assignment]
        assert (await served.http.post("/v1/prompts", json=one | {"key": "other"})).status_code == 422
    async with serving(tmp_path) as served:
        assert len(served.run.source.take(9)[0]) == 1


async def test_promises_with_a_hole_are_not_made_of_other_prompts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    await store.promise("", 1, [b'{"text":"?"}'])  # and where is 0?
    store.close()
    with pytest.raises(JournalError, match="prompt 1 was promised"):
        async with serving(tmp_path):
            pass


async def test_a_submission_with_a_key_is_told_that_it_is_full_in_its_own_time(tmp_path: Path) -> None:
    """Whoever else waits longer."""
    one = {"prompts": [{"text": "?"}]}
    async with serving(tmp_path, room=1) as served:
        assert (await served.http.post("/v1/prompts", json=one | {"key": "a"})).json() == {"ids": [0]}
        longer = asyncio.create_task(served.http.post("/v1/prompts", json=one | {"key": "b", "wait_s": 5}))
        await until(lambda: served.run.rooms > 0)
        async with asyncio.timeout(3):
            assert (await served.http.post("/v1/prompts", json=one | {"key": "c"})).status_code == 429
            assert (await served.http.post("/v1/prompts", json=one | {"key": "a"})).json() == {"ids": [0]}
        served.run.source.take(1)
        assert (await longer).json() == {"ids": [1]}


async def test_readers_have_every_group_at_their_own_pace(tmp_path: Path) -> None:
    """A stream ends with the service; whoever comes back goes on after its cursor, also in the next life."""
    async with serving(tmp_path) as served:
        for id_ in (3, 1):
            served.run.found.put_nowait(group(id_))
        served.run.found.put_nowait(Dropped(2, DropReason.FAILED, "it burnt"))
        page = (await served.http.get("/v1/groups", params={"wait_s": 2, "limit": 1})).json()
        assert (page["cursor"], page["groups"][0]["group"]["prompt"]["id"]) == (1, 3)
        streams = calls(served.service, "stream")
        reading = asyncio.create_task(served.http.get("/v1/groups/stream", params={"after": 1}))
        await until(lambda: streams)
        served.run.found.put_nowait(group(3))  # as it was
        served.run.found.put_nowait(group(3, reward=0.0))  # written anew by a later life of the run
        await served.http.get("/v1/groups", params={"after": 3, "wait_s": 5})
        served.service.drain()
        lines = [json.loads(line) for line in (await reading).text.splitlines()]
    assert [line["cursor"] for line in lines] == [2, 3, 4] and lines[0]["group"]["prompt"]["id"] == 1
    assert lines[1]["dropped"] == {"prompt": 2, "reason": "failed", "cause": "it burnt"}
    assert TypeAdapter(Group).validate_python(lines[2]["group"]) == group(3, reward=0.0)
    async with serving(tmp_path) as served:
        page = (await served.http.get("/v1/groups", params={"after": 3})).json()
        assert [each["cursor"] for each in page["groups"]] == [4]
        streams = calls(served.service, "stream")
        reading = asyncio.create_task(
            served.http.get("/v1/groups/stream", headers={"Accept": "text/event-stream", "Last-Event-ID": "3"})
        )
        await until(lambda: streams)
        served.service.drain()
        told = await reading
        for wrong in ("abc", "-1", "9" * 20):
            refused = await served.http.get("/v1/groups/stream", headers={"Last-Event-ID": wrong})
            assert refused.status_code == 400 and "error" in refused.json()
    assert told.headers["content-type"].startswith("text/event-stream")
    assert told.text.startswith('id: 4\nevent: outcome\ndata: {"cursor":4,') and told.text.endswith("\n\n")


async def test_one_trainer_has_the_batches(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        first = await served.lease()
        assert (await served.http.get("/v1/batch", headers=first)).status_code == 204
        asked = calls(served.service.desk, "next")
        waiting = asyncio.create_task(served.http.get("/v1/batch", params={"wait_s": 5}, headers=first))
        await until(lambda: asked)
        served.run.batch.put_nowait(batch(0, 5, 6))
        told = await waiting
        assert TypeAdapter(Batch).validate_json(told.content) == batch(0, 5, 6)
        assert (await served.http.get("/v1/batch", headers=first)).content == told.content, "until weights were published"
        assert [each["group"]["prompt"]["id"] for each in (await served.http.get("/v1/groups")).json()["groups"]] == [5, 6]
        other = await served.http.post("/v1/trainer", json={"trainer": "other"})
        assert other.status_code == 409 and other.json()["error"]["code"] == "leased"
        second = await served.lease("other", take_over=True)
        told = await served.http.get("/v1/batch", headers=first)
        assert told.status_code == 409 and told.json()["error"]["code"] == "lease"
        assert (await served.http.delete("/v1/trainer", headers=second)).json() == {"ok": True}
        assert (await served.http.get("/v1/status")).json()["trainer"] is None


async def test_weights_are_uploaded_for_the_batch_that_is_out(tmp_path: Path) -> None:
    file = save(WEIGHTS, metadata={"rollyard.stats": '{"loss": 0.5}'})
    async with serving(tmp_path) as served:
        lease = await served.lease()
        assert (await served.http.put("/v1/weights/1", content=file, headers=lease)).json()["error"]["code"] == "step"
        served.run.batch.put_nowait(batch(0, 5))
        await served.http.get("/v1/batch", params={"wait_s": 5}, headers=lease)
        wanted = (await served.http.get("/v1/weights")).json()
        assert wanted["wanted"] == 1 and wanted["tensors"][1] == {"name": "b", "shape": [1, 2], "dtype": "torch.float32"}
        for wrong in (b"", file[:-1], b"\xff" * 9, save({"a": WEIGHTS["a"]}), save(WEIGHTS, metadata={"rollyard.stats": "[]"})):
            told = await served.http.put("/v1/weights/1", content=wrong, headers=lease)
            assert told.status_code == 422 and not served.run.published
        for again in (False, True):
            told = await served.http.put("/v1/weights/1", content=file, headers=lease)
            assert told.json() == {"step": 1, "incarnation": 0, "again": again}
        told = await served.http.put("/v1/weights/1", content=save(WEIGHTS | {"a": torch.zeros(2)}), headers=lease)
        assert told.status_code == 409
        (published,) = served.run.published
        assert published["stats"] == {"loss": 0.5} and torch.equal(published["weights"]["b"], WEIGHTS["b"])
        served.run.batch.put_nowait(None)
        told = await served.http.get("/v1/batch", params={"wait_s": 5}, headers=lease)
        assert told.status_code == 410 and not [name for name in os.listdir(tmp_path) if name.startswith(".upload")]


async def test_weights_of_a_common_disk_lie_below_one_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "w.safetensors"
    inside.mkdir()
    outside.write_bytes(save(WEIGHTS))
    (inside / "good.safetensors").write_bytes(save(WEIGHTS))
    (inside / "link.safetensors").symlink_to(outside)
    async with serving(tmp_path, serve__weights_folder=str(inside)) as served:
        lease = await served.lease()
        served.run.batch.put_nowait(batch(0, 5))
        await served.http.get("/v1/batch", params={"wait_s": 5}, headers=lease)
        for path in ("../w.safetensors", str(outside), "link.safetensors", "none", ".", "a\0b", "x" * 4000):
            told = await served.http.post("/v1/weights/1/file", json={"path": path}, headers=lease)
            assert told.status_code == 403 and str(tmp_path) not in told.text
        told = await served.http.post(
            "/v1/weights/1/file", json={"path": "good.safetensors", "stats": {"loss": 1.0}}, headers=lease
        )
        assert told.json()["step"] == 1 and served.run.published[0]["stats"] == {"loss": 1.0}
        with (inside / "good.safetensors").open("r+b") as file:  # as a trainer that writes its next version there
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
            file.truncate(10)
        assert torch.equal(served.run.published[0]["weights"]["a"], WEIGHTS["a"])
        assert torch.equal(served.run.published[0]["weights"]["b"], WEIGHTS["b"])
    async with serving(tmp_path) as served:
        lease = await served.lease()
        served.run.batch.put_nowait(batch(0, 5))
        await served.http.get("/v1/batch", params={"wait_s": 5}, headers=lease)
        told = await served.http.post("/v1/weights/1/file", json={"path": "inside/good.safetensors"}, headers=lease)
        assert told.status_code == 403 and "serve.weights_folder" in told.json()["error"]["message"]


async def test_a_run_that_failed_is_told_to_whoever_waits(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        lease = await served.lease()
        asked = calls(served.service.desk, "next")
        waiting = asyncio.create_task(served.http.get("/v1/batch", params={"wait_s": 5}, headers=lease))
        await until(lambda: asked)
        served.run.found.put_nowait(RunFailed("the engine burns"))
        told = await waiting
        assert told.status_code == 410 and "the engine burns" in told.text
        health = await served.http.get("/healthz")
        assert (health.status_code, health.json()) == (503, {"ok": False, "state": "failed"})
        assert (await served.http.post("/v1/prompts", json={"prompts": [{"text": "?"}]})).status_code == 503
        assert (await served.http.get("/v1/status")).json()["cause"] == "the engine burns"


async def test_a_run_that_failed_while_a_batch_is_out_ends_what_is_open(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, asyncio.timeout(10):
        lease = await served.lease()
        served.run.batch.put_nowait(batch(0, 5))
        assert (await served.http.get("/v1/batch", params={"wait_s": 5}, headers=lease)).status_code == 200
        stream = served.service.stream(0)
        assert [cursor for cursor, _ in await anext(stream)] == [1]
        waiting = asyncio.create_task(served.service.outcomes(1, 1, 60.0))
        served.run.found.put_nowait(RunFailed("the engine burns"))
        assert [page async for page in stream] == [] == await waiting
        assert (await served.http.get("/v1/batch", headers=lease)).json()["error"]["code"] == "failed"
        served.service.drain()
        told = await served.http.post("/v1/trainer", json={"trainer": "t"})
        assert told.status_code == 503 and "the engine burns" in told.text, "not that it is being stopped"
