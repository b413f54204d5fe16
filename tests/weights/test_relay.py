"""One engine of a machine receives for all of them, and nobody else depends on it longer than one offer."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest
import torch

from rollyard.errors import WeightSyncError
from rollyard.model.folder import load
from rollyard.types import WeightVersion
from rollyard.watch.spans import SpanLog
from rollyard.weights import layout, receive
from rollyard.weights.layout import Layout
from rollyard.weights.slot import Lent, Slot
from tests.tiny import tiny_folder
from tests.weights.moving import CPU, Sides, Spoiling, sides, step
from tests.weights.syncing import driven


def of(both: Sides, engine: str) -> Spoiling:
    found = both.receivers[engine]
    assert isinstance(found, Spoiling)
    return found


@pytest.mark.parametrize(("kind", "machines"), [("relay", 1), ("broadcast", 3)])
async def test_bytes_cross_the_network_once_for_each_machine(tmp_path: Path, kind: str, machines: int) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder, engines=3) as both:
        for number in range(2):
            wanted = step(model, number)
            await both.send(number)
            sent = await both.publisher.deliver()
            size = Layout.with_trailer(of(both, "e0")._expected).size
            assert sent is not None and sent.bytes == machines * size
            for engine in both.receivers.values():
                arrived = engine.take(WeightVersion(number))
                assert arrived is not None and all(torch.equal(arrived[name], wanted[name]) for name in wanted)
            both.taken(number)
        assert [len(of(both, engine)._kept._slots) for engine in sorted(both.receivers)] == (
            [2, 0, 0] if machines == 1 else [2, 2, 2]
        )


async def test_two_machines_of_two_engines(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("relay", model, folder, engines=4) as both:
        for number, engine in enumerate(both.receivers.values()):
            engine._place = lambda address, number=number: f"machine {number % 2}"  # type: ignore[attr-defined]
        for number in range(3):
            wanted = step(model, number)
            await both.send(number)
            for engine in both.receivers.values():
                arrived = engine.take(WeightVersion(number))
                assert arrived is not None and all(torch.equal(arrived[name], wanted[name]) for name in wanted)
            both.taken(number)
        assert [len(of(both, engine)._kept._slots) for engine in ("e0", "e1", "e2", "e3")] == [2, 2, 0, 0]


async def test_one_that_receives_and_fails_fails_the_others_who_say_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails: list[bool] = []

    class Breaking(receive.Group):
        def _start(self, bucket: torch.Tensor) -> object:
            if fails:
                fails.clear()
                raise RuntimeError("out of memory")
            return super()._start(bucket)

    monkeypatch.setattr(receive, "Group", Breaking)
    for retries in (0, 1):
        async with driven("relay", tiny_folder(tmp_path / str(retries)), retries=retries) as run:
            assert await run.bring(0) == ""
            fails.append(True)
            told = await run.bring(1)
            if retries:
                assert told == "" and run.has("e0") and run.has("e1")
            else:
                assert "version 1 did not reach e1: e0, which receives for this machine, failed: " in told
                assert "out of memory" in told
            assert await run.bring(2) == "" and run.has("e0") and run.has("e1")


async def test_one_that_is_gone_while_it_receives_is_noticed_at_once(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("relay", model, folder, engines=2, limit_s=20.0) as both:
        await both.send(0)
        manifest = await both.publisher.publish(WeightVersion(1), ("e0", "e1"))
        waiting = asyncio.ensure_future(asyncio.to_thread(both.receivers["e1"].prepare, manifest))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        began = time.monotonic()
        both.receivers.pop("e0").close()  # as the end of its process would: lines and locks are let go of
        outcomes = await asyncio.gather(waiting, both.publisher.deliver(), return_exceptions=True)
        assert time.monotonic() - began < 2
        assert "e0, which receives for this machine, is gone" in str(outcomes[0])
        assert isinstance(outcomes[1], WeightSyncError)
        both.publisher.lost("e0")
        wanted = step(model, 2)
        await both.send(2)
        arrived = both.receivers["e1"].take(WeightVersion(2))
        assert arrived is not None and all(torch.equal(arrived[name], wanted[name]) for name in wanted)


async def test_one_that_only_reads_may_die_or_stay_away(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("relay", model, folder, engines=2) as both:
        await both.send(0)
        manifest = await both.publisher.publish(WeightVersion(1), ("e0", "e1"))
        both.receivers["e1"].close()
        await asyncio.gather(asyncio.to_thread(both.receivers["e0"].prepare, manifest), both.publisher.deliver())
        wanted = dict(model.named_parameters())
        arrived = both.receivers["e0"].take(WeightVersion(1))
        assert arrived is not None and all(torch.equal(arrived[name], wanted[name]) for name in wanted)


async def test_memory_that_another_engine_decodes_with_is_not_written(tmp_path: Path) -> None:
    """There are more than two slots while engines are apart, and two again when they have come together."""
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("relay", model, folder, engines=2) as both:
        first = step(model, 0)
        await both.send(0)
        behind = both.receivers["e1"].take(WeightVersion(0))
        both.receivers["e0"].take(WeightVersion(0))
        for number in (1, 2, 3):
            step(model, number)
            await both.send(number)
            both.receivers["e0"].take(WeightVersion(number))
            assert behind is not None and all(torch.equal(behind[name], first[name]) for name in first)
            assert len(of(both, "e0")._kept._slots) == 3 - (number == 1)
        for number in (4, 5, 6):
            wanted = step(model, number)
            await both.send(number)
            for engine in both.receivers.values():
                arrived = engine.take(WeightVersion(number))
                assert arrived is not None and all(torch.equal(arrived[name], wanted[name]) for name in wanted)
        assert len(of(both, "e0")._kept._slots) == 2


async def test_the_time_of_each_bucket_is_noted_on_both_sides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    size = Layout.with_trailer(Spoiling("e", (), CPU, 1.0)._expected).size + sum(4 * p.numel() for p in model.parameters())
    for buckets, wanted in ((3, ["bucket 1 of 3", "bucket 2 of 3", "bucket 3 of 3"]), (40, None)):
        monkeypatch.setattr(layout, "BUCKET", -(-size // buckets // 64) * 64 + 64)
        async with sides("broadcast", model, folder) as both:
            spans = SpanLog()
            of(both, "e0")._spans = spans
            await both.send(0)
            for side in (both.device.spans, spans):
                names = [what for _, start, end, what in side.drain() if what.startswith("bucket") and end >= start]
                if wanted is not None:
                    assert names == wanted
                else:  # of many, some share one
                    assert 15 <= len(names) <= 32 and names[0].startswith("buckets 1 to 2 of ")


def test_a_slot_is_whoever_uses_it() -> None:
    slot = Slot(1000, CPU)
    assert slot.begin()
    slot.tensor[:] = 7
    with pytest.raises(WeightSyncError, match="does not hold what it should"):
        Lent(slot.path).use("a")  # while it is written
    slot.end("a")
    reader = Lent(slot.path)
    with pytest.raises(WeightSyncError, match="does not hold what it should"):
        reader.use("b")
    reader.use("a")
    assert bool((reader.tensor == 7).all()) and reader.still and not slot.free and not slot.begin()
    reader.close()
    assert slot.free and slot.begin()
    slot.close()
    with pytest.raises(WeightSyncError, match="cannot be opened"):
        Lent(f"/proc/{os.getpid()}/fd/999999")


async def test_memory_of_a_relay_that_is_gone_is_let_go_of_by_whoever_receives_next(tmp_path: Path) -> None:
    """Alone on its machine it maps nothing any more, and so never looks for something to map."""
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("relay", model, folder, engines=2) as both:
        left = of(both, "e1")
        for number in range(2):
            step(model, number)
            await both.send(number)
            both.receivers["e0"].take(WeightVersion(number))
            left.take(WeightVersion(number))
        assert len(left._lent) == 2
        both.receivers.pop("e0").close()
        both.publisher.lost("e0")
        for number, lent in ((2, 1), (3, 0)):  # first it still decodes with one of them
            step(model, number)
            await both.send(number)
            left.take(WeightVersion(number))
            assert len(left._lent) == lent
