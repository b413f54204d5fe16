"""A trainer at the other end of a line: it is spoken to as if it were here, is late, or is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from rollyard import events as ev
from rollyard.config import WeightsConfig
from rollyard.errors import TrainerLost, WeightSyncError
from rollyard.model.folder import load
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.place.link import Link
from rollyard.protocols.weights import Evidence as AnyEvidence
from rollyard.protocols.weights import Publisher
from rollyard.types import Verdict, WeightVersion
from rollyard.watch.timeline import Timeline
from rollyard.weights import canary
from rollyard.weights.evidence import Evidence
from rollyard.weights.host import serve
from rollyard.weights.prover import Prover
from rollyard.weights.remote import RemoteEvidence, RemotePublisher
from rollyard.weights.sync import Sync
from tests.place.lines import joined
from tests.tiny import tiny_folder
from tests.weights.moving import MOVING, Sides, sides, step
from tests.weights.proving import Answering
from tests.weights.test_evidence import equal, nowhere
from tests.weights.test_many import Noting

V0, V1 = WeightVersion(0), WeightVersion(1)


@asynccontextmanager
async def line(publisher: Publisher, evidence: AnyEvidence) -> AsyncIterator[tuple[Link, Link]]:
    """Here, and where the trainer is."""
    here, there = await joined("trainer", "the run")
    serve(publisher, evidence, there)
    there.ready()
    try:
        yield here, there
    finally:
        await here.close()
        await there.close()


@pytest.fixture
async def device() -> AsyncIterator[DeviceThread]:
    made = DeviceThread(lambda: torch.set_num_threads(1))
    yield made
    made.close()


# ------------------------------------------------------------------------------------------------- publishing


@pytest.mark.parametrize("kind", MOVING)
async def test_every_offer_arrives_bit_for_bit(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder, engines=2) as there, line(there.publisher, cast(Any, None)) as (channel, _):
        here = Sides(RemotePublisher(channel, 20.0), there.receivers, there.device)
        for number in range(3):
            sent = step(model, number)
            await here.send(number)
            here.publisher.taken("e0", WeightVersion(number))
            step(model, 10 + number)
            manifest = await here.publisher.again(("e1",))
            preparing = asyncio.to_thread(there.receivers["e1"].prepare, manifest)
            await asyncio.gather(here.publisher.deliver(), preparing)
            here.publisher.taken("e1", WeightVersion(number))
            for one in there.receivers.values():
                arrived = one.take(WeightVersion(number))
                assert arrived is not None and all(torch.equal(arrived[name], sent[name]) for name in sent)
        here.publisher.lost("e1")
        here.publisher.close()


async def test_what_goes_wrong_there_is_told_here(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("shared_memory", model, folder) as there, line(there.publisher, cast(Any, None)) as (channel, _):
        publisher = RemotePublisher(channel, 20.0)
        with pytest.raises(WeightSyncError, match="nothing that was offered"):
            await publisher.again(("e0",))
        for number in (0, 1):
            await publisher.publish(WeightVersion(number), ("e0",))
            publisher.taken(f"e{number}", WeightVersion(number))
        with pytest.raises(WeightSyncError, match="version 2 finds no free slot: e0 has version 0, e1 has version 1"):
            await publisher.publish(WeightVersion(2), ("e0",))
        publisher.lost("e0")
        assert (await publisher.publish(WeightVersion(2), ("e1",))).version == WeightVersion(2)


async def test_an_offer_that_is_late_ends_before_the_next_begins() -> None:
    slow = Noting("trainer")
    slow.waits = 0.3
    async with line(slow, cast(Any, None)) as (channel, _):
        with pytest.raises(WeightSyncError, match=r"the trainer is late: trainer did not answer weights\.publish within 0\.1 s"):
            await RemotePublisher(channel, 0.1).publish(V0, ("e0",))
        began = time.monotonic()
        slow.waits = 0.0
        manifest = await RemotePublisher(channel, 5.0).publish(V1, ("e0",))
        assert time.monotonic() - began > 0.1 and slow.offered == manifest and manifest.version == V1


async def test_a_trainer_that_is_gone_is_told_with_its_cause(device: DeviceThread) -> None:
    async with line(Noting("trainer"), cast(Any, None)) as (channel, there):
        publisher, evidence = RemotePublisher(channel, 5.0), RemoteEvidence(channel, 5.0)
        await there.close()
        await channel.ended()
        with pytest.raises(TrainerLost, match="the trainer is lost: trainer ended"):
            await publisher.publish(V0, ("e0",))
        with pytest.raises(TrainerLost, match="the trainer is lost: trainer ended"):
            publisher.taken("e0", V0)
        with pytest.raises(TrainerLost, match="the trainer is lost: trainer ended"):
            await evidence.restore()


def sync(publisher: Publisher, evidence: AnyEvidence, heard: list[ev.Event]) -> Sync:
    """Of a single engine that does nothing."""
    prover = Prover(evidence, cast(Any, None))
    config, recorder = WeightsConfig(limit_s=5.0), cast(Any, Silent())
    return Sync({"e0": publisher}, prover, {"e0": cast(Any, None)}, config, heard.append, Timeline(), recorder)


class Silent:
    def copied(self, count: int) -> None: ...


@pytest.mark.parametrize("moment", ["before", "meanwhile", "delivering", "looking"])
async def test_a_trainer_that_is_gone_ends_the_run(moment: str) -> None:
    """No event says that another try may help."""
    there = Noting("trainer")

    class Looking:
        async def published(self, version: WeightVersion, engines: Sequence[str]) -> None:
            if moment == "looking":
                await asyncio.sleep(60)

        def __getattr__(self, name: str) -> object:
            return None

    async def delivering() -> None:
        await asyncio.sleep(60)

    if moment == "meanwhile":
        there.waits = 60.0
    if moment == "delivering":
        there.deliver = delivering  # type: ignore[method-assign]
    heard: list[ev.Event] = []
    async with line(there, cast(Any, Looking())) as (channel, far):
        made = sync(RemotePublisher(channel, 5.0), RemoteEvidence(channel, 5.0), heard)
        if moment == "before":
            await far.close()
        publishing = asyncio.ensure_future(made.actions[ev.Publish](ev.Publish(V0)))
        await asyncio.sleep(0.05)
        await far.close()
        with pytest.raises(TrainerLost, match="the trainer is lost: trainer ended"):
            await publishing
    assert heard == ([ev.Published(V0, ("e0",))] if moment == "delivering" else [])


async def test_a_trainer_that_is_late_is_asked_again() -> None:
    there, heard = Noting("trainer"), list[ev.Event]()
    there.waits = 60.0
    async with line(there, cast(Any, None)) as (channel, _):
        made = sync(RemotePublisher(channel, 0.05), cast(Any, None), heard)
        await made.actions[ev.Publish](ev.Publish(V0))
    assert heard == [ev.SyncFailed(V0, "the trainer is late: trainer did not answer weights.publish within 0.05 s", None)]


# -------------------------------------------------------------------------------------------------- evidence


@asynccontextmanager
async def beside(model: CausalLM, device: DeviceThread) -> AsyncIterator[RemoteEvidence]:
    async with line(Noting("trainer"), Evidence(model, device)) as (channel, _):
        yield RemoteEvidence(channel, 20.0)


async def test_the_canary_and_the_probe_say_what_they_say_beside_the_model(tmp_path: Path, device: DeviceThread) -> None:
    folder = tiny_folder(tmp_path)
    model, before = load(folder), load(folder)
    async with beside(model, device) as evidence:
        asking = Answering(device, {"e0": model})
        prover = Prover(evidence, asking)
        found = await prover.prove(["e0"], V0, nowhere)
        assert found == await Prover(Evidence(model, device), asking).prove(["e0"], V0, nowhere)
        assert found.gap == 0 and found.unseen == () and equal(model, before)
        with pytest.raises(WeightSyncError, match="engine e0 does not decode with all the weights"):
            await Prover(evidence, Answering(device, {"e0": before})).prove(["e0"], V0, nowhere)
        assert equal(model, before)
        await prover.published(V0, ["e0"])
        await device.run(step, model, 1)
        await prover.published(V1, ["e0"])
        assert await prover.check("e0") is Verdict.VERIFIED
        with pytest.raises(WeightSyncError, match="decodes with other weights, those of version 0"):
            stale = Prover(evidence, Answering(device, {"e0": before}))
            stale._version, stale._compares = V1, True
            await stale.check("e0")


async def test_a_number_that_is_none_crosses_the_line(tmp_path: Path, device: DeviceThread) -> None:
    model = load(tiny_folder(tmp_path))
    async with beside(model, device) as evidence:

        async def ask(engine: str, requests: Sequence[Any]) -> list[Any]:
            asked = await Answering(device, {"e0": model})(engine, requests)
            object.__setattr__(asked[3], "logprobs", (float("nan"),))
            return asked

        with pytest.raises(WeightSyncError, match="engine e0 does not compute the trainer's model: inf nats"):
            await Prover(evidence, cast(Any, ask)).prove(["e0"], V0, nowhere)


@pytest.mark.parametrize("times", [1, 2])
async def test_a_canary_that_is_cancelled_here_is_undone_there(
    tmp_path: Path, device: DeviceThread, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """While the trainer's process is at it: it hears nothing of that, and does everything before it puts them back."""
    folder = tiny_folder(tmp_path)
    model, before = load(folder), load(folder)
    began, moves = asyncio.Event(), canary.move
    loop = asyncio.get_running_loop()

    def slow(*args: Any) -> canary.Moved:
        loop.call_soon_threadsafe(began.set)
        time.sleep(0.1)
        return moves(*args)

    monkeypatch.setattr(canary, "move", slow)
    async with beside(model, device) as evidence:
        proving = asyncio.ensure_future(Prover(evidence, Answering(device, {"e0": model})).prove(["e0"], V0, nowhere))
        await began.wait()
        for _ in range(times):
            proving.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await proving
        await evidence.restore()  # comes after that of the canary
        assert model.stamp.whole and equal(model, before)
