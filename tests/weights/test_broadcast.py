"""The group of trainer and engines: who is reached where, and what becomes of a broadcast that nobody waits for."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rollyard import meeting
from rollyard.errors import ConfigError
from rollyard.model.folder import load
from rollyard.place.inline import DeviceThread
from rollyard.types import WeightVersion
from rollyard.weights.broadcast import BroadcastPublisher
from rollyard.weights.source import Source
from tests.tiny import tiny_folder
from tests.weights.moving import receiver, sides, step


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
    publisher, engine = BroadcastPublisher(Source.of(model), device, "127.0.0.2", 20.0), receiver("broadcast", model, "e0")
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
        "from rollyard.weights.source import Source\n"
        "device, source = DeviceThread(), Source.of(load(Path(sys.argv[1])))\n"
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
    publisher = BroadcastPublisher(Source.of(load(tiny_folder(tmp_path))), device, address, 5.0)
    with pytest.raises(ConfigError, match=rf"weights\.address: engines cannot meet at {address}"):
        await publisher.publish(WeightVersion(0), ("e0",))
    publisher.close()
    device.close()
