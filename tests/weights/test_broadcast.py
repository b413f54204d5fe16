"""The group of trainer and engines: who is reached where, and what becomes of a broadcast that nobody waits for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rollyard import meeting
from rollyard.errors import ConfigError, WeightSyncError
from rollyard.model.folder import load
from rollyard.place.inline import DeviceThread
from rollyard.types import Sent, WeightVersion
from rollyard.weights import kept
from rollyard.weights.broadcast import BroadcastPublisher
from rollyard.weights.group import Group, Meeting
from rollyard.weights.kept import Kept
from rollyard.weights.relay import Board
from rollyard.weights.slot import Slot
from rollyard.weights.source import OwnSource
from tests.tiny import tiny_folder
from tests.weights.moving import CPU, LOCAL, receiver, sides, step


async def test_every_side_binds_an_address_of_its_own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's address here is one that an engine would not choose, as on another machine it could not."""
    bound: list[str] = []
    real = meeting.dist.ProcessGroupGloo

    class Watched(real):  # type: ignore[misc]
        @staticmethod
        def create_device(hostname: str) -> Any:
            bound.append(hostname)
            return real.create_device(hostname=hostname)

    monkeypatch.setattr(meeting.dist, "ProcessGroupGloo", Watched)
    folder = tiny_folder(tmp_path)
    model, device = load(folder), DeviceThread()
    publisher, engine = BroadcastPublisher(OwnSource.of(model), device, "127.0.0.2", 20.0), receiver("broadcast", model, "e0")
    manifest = await publisher.publish(WeightVersion(0), ("e0",))
    await asyncio.gather(publisher.deliver(), asyncio.to_thread(engine.prepare, manifest))
    assert sorted(bound) == ["127.0.0.1", "127.0.0.2"]
    engine.close()
    publisher.close()
    device.close()


async def test_whoever_gives_up_waiting_does_not_end_what_goes_on(tmp_path: Path) -> None:
    """The next offer begins when the sender that has buffer and group is done with them."""
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("broadcast", model, folder, limit_s=2.0) as both:
        await both.publisher.publish(WeightVersion(1), ("e0",))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await both.publisher.deliver()
        sent = step(model, 2)
        began = time.monotonic()
        await both.send(2)
        assert time.monotonic() - began > 1  # nobody came to the first offer until its limit
        arrived = both.receivers["e0"].take(WeightVersion(2))
        assert arrived is not None and all(torch.equal(arrived[name], sent[name]) for name in sent)


@pytest.mark.slow
def test_a_process_ends_while_a_broadcast_waits_for_an_engine(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys, time; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from rollyard.model.folder import load; from rollyard.place.inline import DeviceThread\n"
        "from rollyard.types import WeightVersion; from rollyard.weights.broadcast import BroadcastPublisher\n"
        "from rollyard.weights.source import OwnSource\n"
        "device, source = DeviceThread(), OwnSource.of(load(Path(sys.argv[1])))\n"
        "publisher = BroadcastPublisher(source, device, '127.0.0.1', 100.0)\n"
        "async def main():\n"
        "    await publisher.publish(WeightVersion(0), ('e0',))\n"
        "    await asyncio.wait((asyncio.ensure_future(publisher.deliver()),), timeout=0.1)\n"
        "asyncio.run(main()); publisher.close(); device.close()\n"
    )
    command = [sys.executable, "-c", code, str(tiny_folder(tmp_path)), str(Path(__file__).parents[2])]
    ended = subprocess.run(command, check=False, timeout=80, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("address", ["203.0.113.9", "no.such.machine.invalid"])
async def test_an_address_that_is_none_of_this_machine(tmp_path: Path, address: str) -> None:
    device = DeviceThread(lambda: torch.set_num_threads(1))
    publisher = BroadcastPublisher(OwnSource.of(load(tiny_folder(tmp_path))), device, address, 5.0)
    with pytest.raises(ConfigError, match=rf"weights\.address: engines cannot meet at {address}"):
        await publisher.publish(WeightVersion(0), ("e0",))
    publisher.close()
    device.close()


@pytest.mark.parametrize("engines", [1, 2])
async def test_an_engine_that_is_back_under_its_name_meets_a_new_group(tmp_path: Path, engines: int) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("broadcast", model, folder, engines=engines, limit_s=10.0) as both:
        await both.send(0)
        for engine in both.receivers.values():
            engine.take(WeightVersion(0))
        both.taken(0)
        both.receivers["e0"].close()
        both.publisher.lost("e0")
        both.receivers["e0"] = receiver("broadcast", model, "e0", 10.0)
        wanted, began = step(model, 1), time.monotonic()
        await both.send(1)
        assert time.monotonic() - began < 2
        for engine in both.receivers.values():
            arrived = engine.take(WeightVersion(1))
            assert arrived is not None and all(torch.equal(arrived[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("how", ["no base", "no memory"])
async def test_one_that_cannot_begin_fails_the_others_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """That memory cannot be had is no mistake of the user's by then."""
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("broadcast delta", model, folder, engines=2, limit_s=20.0) as both:
        await both.send(0)
        for engine in both.receivers.values():
            engine.take(WeightVersion(0))
        both.taken(0)
        step(model, 1)
        manifest = await both.publisher.publish(WeightVersion(1), ("e0", "e1"))
        assert manifest.base
        fails = cast(Any, both.receivers["e0"])._kept
        if how == "no base":
            monkeypatch.setattr(fails, "base", lambda name: Kept.base(fails, "another"))
            told = "e0 does not have the version that changes were sent for"
        else:
            monkeypatch.setattr(kept, "Slot", lambda size, device: no_memory())
            told = "version 1 did not reach e0: .*shared memory"
        began = time.monotonic()
        coming = [asyncio.to_thread(engine.prepare, manifest) for engine in both.receivers.values()]
        found = await asyncio.gather(both.publisher.deliver(), *coming, return_exceptions=True)
        assert time.monotonic() - began < 3
        assert all(each is None or isinstance(each, WeightSyncError | Sent) for each in found)  # some may have come through
        with pytest.raises(WeightSyncError, match=told):
            raise found[1]  # type: ignore[misc]
        monkeypatch.undo()
        manifest = await both.publisher.again(("e0", "e1"))
        coming = [asyncio.to_thread(engine.prepare, manifest) for engine in both.receivers.values()]
        await asyncio.gather(both.publisher.deliver(), *coming)


def no_memory() -> Slot:
    raise ConfigError("8 bytes of shared memory: no", where="weights.transport", remedy="free memory")


def test_memory_of_another_device_is_given_back() -> None:
    """But for what the engine decodes with; a device without a number is the one that torch gives tensors of it."""
    mine, elsewhere = Kept("e0", 1000, 2), torch.device("meta")

    def next_(device: torch.device, name: str) -> Slot:
        slot, _ = mine.begin(device)
        slot.end(name)
        mine.fill(slot)
        return slot

    first = next_(elsewhere, "a")
    mine.take()
    next_(elsewhere, "b")
    third = next_(CPU, "c")
    assert mine._slots == [first, third]  # that of "b" is nobody's
    mine.take()
    fourth = next_(CPU, "d")
    assert mine._slots == [third, fourth]
    mine.close()


def test_whoever_does_not_get_into_a_group_does_not_look_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    boards = list[Board]()
    made = Board.__init__

    def noting(self: Board, *args: Any) -> None:
        boards.append(self)
        made(self, *args)

    monkeypatch.setattr(Board, "__init__", noting)
    store = meeting.held_store(LOCAL, 5.0)
    for engine in ("e0", "e1"):
        meeting.dist.PrefixStore("weights-1", store).set(f"at-{engine}", "here")
    with pytest.raises(RuntimeError, match="rank 0 did not come"):
        Group(Meeting(store, 1, ("e0", "e1"), CPU, 0.3), "e0", LOCAL, "here")
    assert [board._handle for board in boards] == [-1]
