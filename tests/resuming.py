"""Lives of a run around doubles, on a virtual clock. Weights are a digest of all that they were trained on, in order."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import rollyard
from rollyard.bench import doubles, virtual
from rollyard.bench.placements import config_of
from rollyard.bench.theory import Work
from rollyard.durable import write_folder
from rollyard.engine.fake import FakeEngine, Script
from rollyard.events import EngineId, Rollover
from rollyard.journal.recover import Past
from rollyard.prompts.source import Row, Source
from rollyard.protocols.training import Trainer
from rollyard.protocols.weights import Evidence
from rollyard.resume import NOTHING
from rollyard.stations import Stations
from rollyard.types import Request, TrainBatch, TrainStats, WeightVersion
from rollyard.watch.report import Report
from rollyard.watch.snapshot import Header
from rollyard.watch.step import Step
from rollyard.watch.terminal import View

Length = Callable[[int, int], int]


class Killed(Exception):
    """The process is no more."""


class Death:
    """Kills a run at a named point, and whatever it would still write after that.

    Args:
        name: of the point.
        times: that it is passed before.
    """

    def __init__(self, name: str = "", times: int = 0) -> None:
        self._name, self._times, self.dead = name, times, False

    def __call__(self, name: str) -> None:
        self._times -= name == self._name
        self.dead = self.dead or self._times < 0
        if self.dead:
            raise Killed(name)


class Digest:
    """A trainer whose weights say what they have learnt, and by which lives (protocols.Trainer)."""

    def __init__(self, past: Past, path: Path) -> None:
        self.version, self._life = past.version, past.lives
        self.known: list[list[int]] = []
        self.weights = "as it was found"
        if past.checkpoint:
            saved = json.loads((path / past.checkpoint / "digest.json").read_text())
            self.known, self.weights = saved["known"], saved["weights"]
            assert saved["version"] == list(past.version) and past.version.step == len(self.known)

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        await asyncio.sleep(0.3)
        samples = [sample for shard in shards for sample in shard.samples]
        assert shards[0].step == self.version.step
        content = [(each.group, each.member, each.token_ids, each.logprobs, each.advantages) for each in samples]
        self.weights = hashlib.blake2b(repr((self.weights, content)).encode(), digest_size=8).hexdigest()
        self.known.append(sorted({sample.group for sample in samples}))
        self.version = WeightVersion(self.version.step + 1, self._life)
        trained = sum(sum(sample.mask) for sample in samples)
        return TrainStats(self.version.step, 0.5, 0.0, 0.0, trained, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)

    async def settle(self) -> WeightVersion:
        return self.version

    async def save(self, folder: Path) -> None:
        saved = json.dumps({"version": self.version, "known": self.known, "weights": self.weights})
        write_folder(folder, lambda draft: (draft / "digest.json").write_text(saved))

    async def become(self, version: WeightVersion) -> None:
        raise AssertionError("nobody hands it over")

    async def close(self) -> None:
        """Nothing is open."""


def remaining(count: int | None, done: Set[int]) -> Source:
    """So many prompts, or prompts without end, but for those that are done."""
    return Source(lambda place: (place, Row("")), lambda number, row: ((1,) * doubles.PROMPT_TOKENS, ""), count, done)


class Asked(FakeEngine):
    """Remembers whom it was asked for, and what they had written."""

    asked: list[Request]

    def generate(self, requests: Sequence[Request]) -> None:
        super().generate(requests)
        self.asked += requests


@dataclass
class Life:
    """What became of it."""

    steps: list[Step] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    past: Past = NOTHING
    trainer: Digest | None = None
    report: Report | None = None
    finished: str = ""

    @property
    def weights(self) -> str:
        assert self.trainer is not None
        return self.trainer.weights

    @property
    def known(self) -> list[list[int]]:
        """Prompts of each batch that led to the weights."""
        assert self.trainer is not None
        return self.trainer.known


def work(**changes: Any) -> Work:
    return Work(1.0, **{"steps": 5, "groups": 2, "size": 2, "staleness": 0, "generate": 1, "slots": 4, "median": 6} | changes)


def stations(past: Past, life: Life, path: Path, of: Work, prompts: int, length: Length) -> Stations:
    def script(request: Request) -> Script:
        return Script((1,) * length(*request.id[:2]))

    engine = Asked("engine-0", slots=of.slots, script=script, token_s=0.05, clock=doubles.now)
    engine.asked, life.past, life.trainer = life.asked, past, Digest(past, path)
    trainers: Mapping[EngineId | None, Trainer] = {None: life.trainer}
    return Stations(
        source=remaining(prompts, past.done),
        held_out=(),
        scorer=doubles.Immediate(),
        text=lambda ids, stop, finish: "",
        window=doubles.WINDOW,
        size=1,
        engines={engine.id: engine},
        trainers=trainers,
        ranks=1,
        publishers={engine.id: doubles.DoublePublisher()},
        evidence=cast(Evidence, object()),
        handoffs={},
        starts=(engine.start,),
    )


def live(
    path: Path,
    of: Work,
    *,
    placement: str = "separate",
    prompts: int = 1000,
    length: Length | None = None,
    death: Death | None = None,
    until_s: float | None = None,
    stop_after: int | None = None,
    view: Callable[[Header], View] | None = None,
    **options: Any,
) -> Life:
    """One life of the run in `path / "run"`: its first, or its next.

    Args:
        length: tokens of a completion, by group and member.
        death: ends it.
        until_s: virtual seconds after which it is killed.
        stop_after: steps after which it is asked to stop.
        options: with two underscores in their names; in a first life `checkpoint.every` is 2.
    """
    life, folder, death = Life(), path / "run", death or Death()
    dotted = {name.replace("__", "."): value for name, value in options.items()}

    def made(past: Past) -> Stations:
        return stations(past, life, folder, of, prompts, length or of.length)

    if folder.exists():
        run = rollyard.Run.resume(folder, dotted, stations=made, at=death, view=view)
    else:
        config = config_of(placement, Rollover.KEEP if placement == "async" else Rollover.DRAIN, of, path)
        checkpoint = config.checkpoint.model_copy(update={"every": 2})
        run = rollyard.Run(config.model_copy(update={"checkpoint": checkpoint}), stations=made, at=death, view=view)

    async def steps() -> None:
        async for step in run:
            life.steps.append(step)
            if len(life.steps) == stop_after:
                run.stop("enough")

    async def whole() -> None:
        going = asyncio.ensure_future(steps())

        def kill() -> None:
            death.dead = True
            going.cancel()

        timer = None if until_s is None else asyncio.get_running_loop().call_later(until_s, kill)
        try:
            await going
        except (Killed, asyncio.CancelledError):
            pass
        finally:
            if timer is not None:
                timer.cancel()

    virtual.run(whole())
    life.report, life.finished = run.report, run.finished
    return life
