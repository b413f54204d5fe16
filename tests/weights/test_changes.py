"""Only what changed travels, to engines that have the version before; all of it in every other case."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from rollyard.errors import WeightSyncError
from rollyard.model.folder import load
from rollyard.types import Manifest, Sent, WeightVersion
from rollyard.weights import receive
from rollyard.weights.checkpoint import CHANGES
from rollyard.weights.layout import Layout
from tests.tiny import tiny_folder
from tests.weights.moving import MOVING, Sides, receiver, sides, step
from tests.weights.syncing import driven

DELTA = [kind for kind in MOVING if kind.endswith("delta")]
MOVED = [kind for kind in DELTA if kind != "shared_memory delta"]  # engines have memory of their own


async def sent(both: Sides) -> Sent:
    found = await both.publisher.deliver()
    assert found is not None
    return found


def has(both: Sides, engine: str, version: int, wanted: dict[str, torch.Tensor]) -> bool:
    arrived = both.receivers[engine].take(WeightVersion(version))
    return arrived is not None and all(torch.equal(arrived[name], wanted[name]) for name in wanted)


async def prepared(both: Sides, manifest: Manifest, *engines: str) -> None:
    await asyncio.gather(*(asyncio.to_thread(both.receivers[name].prepare, manifest) for name in engines))
    await both.publisher.deliver()


@pytest.mark.parametrize("kind", DELTA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_bytes_follow_what_changed(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    folder = tiny_folder(tmp_path, tied=False)
    model = load(folder, dtype)
    size = Layout.of(receiver(kind, model, "e9")._expected).size  # type: ignore[attr-defined]
    async with sides(kind, model, folder, engines=2) as both:
        first = await both.send(0)
        assert (await sent(both)).unchanged is None and has(both, "e0", 0, dict(model.named_parameters()))
        both.receivers["e1"].take(WeightVersion(0))
        both.taken(0)
        machines = 2 if kind == "broadcast delta" else 1
        for number in (1, 2, 4, 5, 6):
            wanted = step(model, number)
            manifest = await both.send(number)
            travelled = await sent(both)
            assert travelled.unchanged is not None
            if number == 6:  # all of it changed: a little bookkeeping at most besides
                assert travelled.bytes < 1.01 * machines * size + 4096 and travelled.unchanged < 0.01
            else:
                assert number > 1 or manifest.base == ("" if kind == "shared_memory delta" else first.name)
                assert travelled.bytes < 0.15 * machines * size and 0.96 < travelled.unchanged < 0.99
            assert has(both, "e0", number, wanted) and has(both, "e1", number, wanted)
            both.taken(number)


@pytest.mark.parametrize("kind", DELTA)
async def test_a_version_that_was_offered_before_goes_whole(tmp_path: Path, kind: str) -> None:
    """As a canary's are: what they prove is the way of every tensor."""
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder) as both:
        for number in (1, 2, 4):
            wanted = step(model, number)
            assert (await both.send(7)).base == "" and (await sent(both)).unchanged is None
            assert has(both, "e0", 7, wanted)
            both.taken(7)
        for attempt in (1, 0):  # moved, and put back
            wanted, version = step(model, attempt), WeightVersion(7, -attempt)
            manifest = await both.publisher.publish(version, ["e0"])
            prepared = asyncio.to_thread(both.receivers["e0"].prepare, manifest)
            await asyncio.gather(prepared, both.publisher.deliver())
            assert manifest.base == "" and (await sent(both)).unchanged is None
            found = both.receivers["e0"].take(version)
            assert found is not None and all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
            both.publisher.taken("e0", version)
        step(model, 5)
        await both.send(8)
        assert (await sent(both)).unchanged is not None


@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("what", ["lost", "missed", "behind"])
async def test_who_does_not_have_the_version_before_gets_all_of_it(tmp_path: Path, kind: str, what: str) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder, engines=2) as both:
        await both.send(0)
        for one in both.receivers.values():
            one.take(WeightVersion(0))
        both.taken(0)
        if what == "lost":  # and another of its name has come
            both.publisher.lost("e1")
            both.receivers["e1"].close()
            both.receivers["e1"] = receiver(kind, model, "e1")
            await prepared(both, await both.publisher.again(("e1",)), "e1")
        else:
            step(model, 1)
            await both.send(1)
            both.receivers["e0"].take(WeightVersion(1))
            both.publisher.taken("e0", WeightVersion(1))
            if what == "behind":  # it took another offer of that version, which has the same bytes
                await prepared(both, await both.publisher.again(("e1",)), "e1")
        wanted = step(model, 2)
        assert (await both.send(2)).base == ""
        assert has(both, "e0", 2, wanted) and has(both, "e1", 2, wanted)
        both.taken(2)
        wanted = step(model, 4)
        assert (await both.send(4)).base
        assert has(both, "e0", 4, wanted) and has(both, "e1", 4, wanted)


@pytest.mark.parametrize("kind", MOVED)
async def test_one_that_missed_it_has_the_same_contents_afterwards(tmp_path: Path, kind: str) -> None:
    """What is offered again is whole; then changes are for both."""
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder, engines=2) as both:
        for number in (0, 1):
            wanted = step(model, number)
            await both.send(number)
            assert has(both, "e0", number, wanted)
            both.publisher.taken("e0", WeightVersion(number))
            again = await both.publisher.again(("e1",))
            assert again.base == ""
            await prepared(both, again, "e1")
            assert has(both, "e1", number, wanted)
            both.publisher.taken("e1", WeightVersion(number))
        for number in (2, 4):
            wanted = step(model, number)
            assert (await both.send(number)).base
            assert has(both, "e0", number, wanted) and has(both, "e1", number, wanted)
            both.taken(number)


@pytest.mark.parametrize("kind", MOVED)
async def test_an_engine_that_lost_its_base_says_so_and_is_sent_all_of_it(tmp_path: Path, kind: str) -> None:
    """The trainer could not know: nobody told it."""
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder, limit_s=2.0) as both:
        await both.send(0)
        both.receivers["e0"].take(WeightVersion(0))
        both.taken(0)
        both.receivers["e0"].close()
        both.receivers["e0"] = receiver(kind, model, "e0", 2.0)
        wanted = step(model, 1)
        with pytest.raises(WeightSyncError, match=r"does not have the version that changes were sent for|did not reach e0"):
            await both.send(1)
        await prepared(both, await both.publisher.again(("e0",)), "e0")
        assert has(both, "e0", 1, wanted)


@pytest.mark.parametrize("kind", MOVED)
async def test_changes_that_change_on_the_way_are_noticed(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    apply = receive.apply

    def spoilt(frame: torch.Tensor, bucket: torch.Tensor, number: int) -> None:
        frame[len(frame) // 2] ^= 16
        apply(frame, bucket, number)

    async with sides(kind, model, folder, engines=2) as both:
        await both.send(0)
        for one in both.receivers.values():
            one.take(WeightVersion(0))
        both.taken(0)
        wanted = step(model, 1)
        if kind == "checkpoint delta":
            manifest = await both.publisher.publish(WeightVersion(1), ("e0", "e1"))
            path = Path(manifest.source) / CHANGES
            content = bytearray(path.read_bytes())
            content[-100] ^= 16
            path.write_bytes(content)
            for one in both.receivers.values():
                with pytest.raises(WeightSyncError, match="what changed in bucket 1 arrived changed"):
                    one.prepare(manifest)
        else:
            monkeypatch.setattr(receive, "apply", spoilt)
            with pytest.raises(WeightSyncError, match="what changed in bucket 1 arrived changed"):
                await both.send(1)
            monkeypatch.undo()
        again = await both.publisher.again(("e0", "e1"))
        await prepared(both, again, "e0", "e1")
        assert has(both, "e0", 1, wanted) and has(both, "e1", 1, wanted)


async def test_an_offer_that_failed_is_followed_by_a_whole_one(tmp_path: Path) -> None:
    async with driven("broadcast delta", tiny_folder(tmp_path), retries=0) as run:
        bases: list[str] = []
        publish = run.publisher.publish

        async def noting(version: WeightVersion, engines: tuple[str, ...]) -> Manifest:
            manifest = await publish(version, engines)
            bases.append(manifest.base)
            return manifest

        run.publisher.publish = noting  # type: ignore[method-assign, assignment]

        def breaks(part: str) -> None:
            if part == "load":
                raise WeightSyncError("not this time")

        assert [await run.bring(number) for number in (1, 2)] == ["", ""]
        run.engines["e1"].happens = breaks
        assert "not this time" in await run.bring(4)
        run.engines["e1"].happens = lambda part: None
        assert [await run.bring(number) for number in (5, 7)] == ["", ""]
        assert [bool(base) for base in bases] == [False, True, True, False, True]
        assert run.has("e0") and run.has("e1")
