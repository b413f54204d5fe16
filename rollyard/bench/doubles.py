"""Stations that take the time they are told and compute nothing: to see a placement without the machine it runs on.

Everything else of the run is the real one: loop, conductor, core, router, rollover, journal, report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

from rollyard.bench.theory import PARAMETERS, STATE_BYTES, WEIGHT_BYTES, Work
from rollyard.engine.fake import FakeEngine, Script
from rollyard.events import EngineId
from rollyard.protocols.training import Trainer
from rollyard.protocols.weights import Evidence, Handoff, Publisher
from rollyard.stations import Stations
from rollyard.types import (
    Completion,
    Handed,
    Manifest,
    Prompt,
    Request,
    Reward,
    TensorInfo,
    TrainBatch,
    TrainStats,
    WeightVersion,
)

PROMPT_TOKENS = 16
WINDOW = 4096  # tokens; never reached
TENSORS = (TensorInfo("weight", (int(PARAMETERS),), "torch.bfloat16"),)


def now() -> float:
    """Seconds on the event loop's clock."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Meter:
    """What the doubles of one run did."""

    engines: tuple[DoubleEngine, ...] = ()
    trainers: int = 0
    trained_s: float = 0.0  # of all trainers
    read_again: int = 0  # tokens that engines were given to read once more, of completions that were cut


class DoubleEngine(FakeEngine):
    """A fake engine to which weights take their time, and which counts what it is given to read again."""

    def __init__(self, id: str, slots: int, work: Work, meter: Meter, transfer_s: float) -> None:
        super().__init__(
            id, slots=slots, script=scripts(work), token_s=work.token_s, load_s=work.load_s, window=WINDOW, clock=now
        )
        self._transfer_s, self._meter = transfer_s, meter

    def generate(self, requests: Sequence[Request]) -> None:
        super().generate(requests)
        self._meter.read_again += sum(len(each.prompt_ids) + len(each.written_ids) for each in requests if each.written_ids)

    async def prepare(self, manifest: Manifest) -> None:
        await asyncio.sleep(self._transfer_s)
        await super().prepare(manifest)


@cache
def scripts(work: Work) -> Callable[[Request], Script]:
    """What becomes of each request: its length belongs to its prompt and member alone."""
    words = {length: Script((1,) * length) for length in range(1, work.cap + 1)}
    return lambda request: words[work.length(request.id.group, request.id.member)]


class DoubleTrainer:
    """A step takes `step_s`, whatever is in it (protocols.Trainer)."""

    def __init__(self, step_s: float, meter: Meter) -> None:
        self._step_s, self._meter = step_s, meter
        self._version = WeightVersion(0)

    @property
    def version(self) -> WeightVersion:
        return self._version

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        began = now()
        await asyncio.sleep(self._step_s)
        self._meter.trained_s += now() - began
        step, tokens = self._version.step, sum(sum(sample.mask) for shard in shards for sample in shard.samples)
        self._version = WeightVersion(step + 1)
        return TrainStats(step + 1, 0.0, 0.0, 0.0, tokens, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)

    async def settle(self) -> WeightVersion:
        return self._version

    async def save(self, folder: Path) -> None:
        await asyncio.to_thread(folder.mkdir, parents=True)

    async def become(self, version: WeightVersion) -> None:
        self._version = version

    async def close(self) -> None:
        """Nothing is open."""


class DoublePublisher:
    """Copying takes the trainer `copy_s`, and the rest `transfer_s` beside it (protocols.Publisher)."""

    def __init__(self, copy_s: float = 0.0, transfer_s: float = 0.0) -> None:
        self._copy_s, self._transfer_s = copy_s, transfer_s
        self._offered = Manifest(WeightVersion(0), TENSORS, 0)

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        await asyncio.sleep(self._copy_s)
        self._offered = Manifest(version, TENSORS, int(WEIGHT_BYTES * PARAMETERS) if self._copy_s else 0)
        return self._offered

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        return self._offered

    async def deliver(self) -> None:
        await asyncio.sleep(self._transfer_s)

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """Nothing is mapped."""

    def lost(self, engine: EngineId) -> None:
        """Nothing is mapped."""

    def close(self) -> None:
        """Nothing to give back."""


class DoubleHandoff:
    """A training state that takes its time (protocols.Handoff)."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def give(self, version: WeightVersion, to: str) -> Manifest:
        return Manifest(version, TENSORS, int(STATE_BYTES * PARAMETERS))

    async def given(self) -> None:
        await asyncio.sleep(self._seconds)

    async def take(self, manifest: Manifest) -> Handed:
        await asyncio.sleep(self._seconds)
        return Handed(manifest.bytes_copied, self._seconds)


class Endless:
    """Prompts without end (protocols.PromptSource)."""

    def __init__(self) -> None:
        self._cursor = 0

    @property
    def cursor(self) -> int:
        return self._cursor

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        begin, self._cursor = self._cursor, self._cursor + count
        return tuple(Prompt(place, place, (1,) * PROMPT_TOKENS, "") for place in range(begin, self._cursor)), False


class Immediate:
    """A judge without a delay (protocols.Scorer). Members of a group differ, so that there is something to learn."""

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        return Reward(float(completion.member % 2))

    async def close(self) -> None:
        """Nothing is open."""


def stations(placement: str, work: Work, meter: Meter) -> Stations:
    """What a run of this placement is made of. Each placement has all devices:

    separate, async  `work.generate` engines, and a trainer on `work.train` devices
    colocated        all devices generate; then all train, in so much less time
    swap             each half has half of all slots when it generates, and half of all devices when it trains
    """
    if placement == "colocated":
        engines, slots, step_s = work.devices, work.slots, work.on(work.devices)
    elif placement == "swap":
        engines, slots, step_s = 2, work.half_slots, work.on(work.devices / 2)
    else:
        engines, slots, step_s = work.generate, work.slots, work.training_s
    apart = placement in ("separate", "async")
    transfer_s = work.transfer_s if apart else 0.0
    names = [f"engine-{number}" for number in range(engines)]
    meter.engines = tuple(DoubleEngine(name, slots, work, meter, transfer_s) for name in names)
    halves: list[EngineId | None] = [*names] if placement == "swap" else [None]
    trainers: dict[EngineId | None, Trainer] = {half: DoubleTrainer(step_s, meter) for half in halves}
    meter.trainers = len(trainers)
    publishers: dict[EngineId, Publisher]
    if placement == "swap":
        publishers = {name: DoublePublisher() for name in names}
    else:
        publishers = dict.fromkeys(names, DoublePublisher(work.copy_s if apart else 0.0, transfer_s))
    handoffs: dict[EngineId, Handoff] = {name: DoubleHandoff(work.handoff_s) for name in names}
    return Stations(
        source=Endless(),
        held_out=(),
        scorer=Immediate(),
        text=lambda ids, stop, finish: "",
        window=WINDOW,
        size=int(WEIGHT_BYTES * PARAMETERS),
        engines={engine.id: engine for engine in meter.engines},
        trainers=trainers,
        ranks=1,
        publishers=publishers,
        evidence=cast(Evidence, object()),  # canary and probe are off: nobody asks it
        handoffs=handoffs if placement == "swap" else {},
        starts=tuple(engine.start for engine in meter.engines),
    )
