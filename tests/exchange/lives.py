"""Jobs of an exchange that are killed: real ones, around stations that compute nothing, whose writing ends at any moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from pathlib import Path
from threading import Lock
from typing import Any, cast

import pytest

import rollyard
from rollyard.bench import doubles
from rollyard.bench.placements import config_of
from rollyard.bench.theory import Work
from rollyard.config import Config, ExchangeConfig, RunConfig
from rollyard.engine.fake import FakeEngine, Script
from rollyard.events import Rollover
from rollyard.exchange import folder
from rollyard.exchange.agreed import FORMAT
from rollyard.exchange.generation import Generation
from rollyard.place.inline import DeviceThread
from rollyard.protocols.weights import Evidence, TrainerEvidence
from rollyard.stations import Stations, Trainers
from rollyard.training import Training
from rollyard.types import Request, TrainBatch, TrainStats, WeightVersion
from rollyard.worker import Beginning
from tests.resuming import remaining

JOB: ContextVar[str] = ContextVar("JOB")
AGREED = {"format": FORMAT}


class Killed(Exception):
    """The process is no more."""


class Reaper:
    """Ends jobs at their file operations: before one, half way, or after it. A dead job changes no file any more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: dict[str, int] = {}  # moments that each job still has; endless where it is not named
        self.dead: set[str] = set()
        self._working = Lock()  # one thing at a time: when a job is dead, nothing of it goes on
        for name in ("write_whole", "commit_folder", "remove_folder"):
            monkeypatch.setattr(folder, name, self._mortal(getattr(folder, name), name))

    def tick(self, job: str) -> None:
        if job in self.dead:
            raise Killed(job)
        if job in self.left:
            self.left[job] -= 1
            if self.left[job] < 0:
                self.dead.add(job)
                raise Killed(job)

    def _mortal(self, call: Callable[..., None], name: str) -> Callable[..., None]:
        def called(path: Path, *rest: object) -> None:
            job = JOB.get()
            with self._working:
                self.tick(job)
                try:
                    self.tick(job)
                except Killed:
                    half(name, path)
                    raise
                call(path, *rest)
                return self.tick(job)

        return called

    async def live(self, job: str, work: Coroutine[Any, Any, object], moments: int | None, seconds: float | None) -> bool:
        """A life of a job, of at most so many moments and seconds (None: until its end). Did it come to that?"""
        self.dead.discard(job)
        self.left.pop(job, None)
        if moments is not None:
            self.left[job] = moments
        JOB.set(job)  # all that it begins knows it
        task = asyncio.create_task(work)

        def kill() -> None:
            self.dead.add(job)
            task.cancel()

        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, kill)
        try:
            await task
        except (Killed, asyncio.CancelledError):
            return False
        finally:
            if timer is not None:
                timer.cancel()
            with self._working:
                self.dead.add(job)
        return True


def half(name: str, path: Path) -> None:
    """What a killed operation leaves."""
    if name == "write_whole":
        path.with_name(f".{path.name}.draft").write_bytes(b'{"half')
    elif name == "remove_folder":
        path.rename(path.with_name(f".{path.name}.old"))


# ---------------------------------------------------------------------------------------------- training


class Lineage:
    """A trainer whose weights are the list of all that it learnt from (protocols.Trainer)."""

    def __init__(self, reaper: Reaper, known: list[list[int]]) -> None:
        self._reaper, self.known = reaper, known

    @property
    def version(self) -> WeightVersion:
        return WeightVersion(len(self.known))

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        assert shards[0].step == len(self.known)
        await asyncio.sleep(0.3)
        self._reaper.tick("training")
        self.known.append(list(dict.fromkeys(sample.group for shard in shards for sample in shard.samples)))
        return TrainStats(len(self.known), 0.5, 0.0, 0.0, 7, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)

    async def settle(self) -> WeightVersion:
        return self.version

    async def save(self, folder: Path) -> None:
        self._reaper.tick("training")
        await asyncio.to_thread(folder.mkdir)
        await asyncio.to_thread((folder / "lineage.json").write_text, json.dumps(self.known))
        self._reaper.tick("training")

    async def become(self, version: WeightVersion) -> None:
        raise AssertionError("nobody hands it over")

    async def close(self) -> None:
        """Nothing is open."""


class Silent:
    """A trainer's evidence, as far as it is asked for."""

    async def record(self, version: WeightVersion, folder: Path) -> None:
        (folder / "manifest.json").write_text("{}")


class Learning(Training):
    """The real job with such a trainer."""

    def __init__(self, config: Config, reaper: Reaper) -> None:
        super().__init__(config)
        self._reaper = reaper

    async def _trainers(self, model: Path, device: DeviceThread, built: AsyncExitStack, begin: Beginning) -> Trainers:
        known = json.loads((begin.checkpoint / "lineage.json").read_text()) if begin.checkpoint else []
        return Trainers(Lineage(self._reaper, known), 1, cast(TrainerEvidence, Silent()), ())


async def train(config: Config, reaper: Reaper) -> None:
    steps = Learning(config, reaper).steps()
    try:
        async for _ in steps:
            pass
    finally:
        await steps.aclose()


# ------------------------------------------------------------------------------------------------ generation


class Listening(FakeEngine):
    """Remembers whom it was asked for."""

    def __init__(self, name: str, asked: set[int], script: Callable[[Request], Script]) -> None:
        super().__init__(name, slots=4, script=script, token_s=0.01, clock=doubles.now)
        self._asked = asked

    def generate(self, requests: Sequence[Request]) -> None:
        super().generate(requests)
        self._asked |= {request.id.group for request in requests}


def stations(config: Config, asked: set[int], recovered: set[int]) -> Stations:
    """Of one life. `recovered` are the groups that it has from those before it."""
    exchange = Generation(Path(config.exchange.folder), config.exchange.limit_s)
    done = exchange.open(AGREED)
    recovered |= exchange.folder.groups() - done
    engines: Mapping[str, Listening] = {name: Listening(name, asked, doubles.scripts(Work(1.0))) for name in ("e0", "e1")}
    return Stations(
        source=remaining(None, done),
        held_out=(),
        scorer=doubles.Immediate(),
        text=lambda ids, stop, finish: "",
        window=doubles.WINDOW,
        size=1,
        engines=dict(engines),
        trainers={},
        ranks=1,
        publishers=dict.fromkeys(engines, doubles.DoublePublisher()),
        evidence=cast(Evidence, object()),
        handoffs={},
        starts=tuple(engine.start for engine in engines.values()),
        exchange=exchange,
    )


async def generate(config: Config, asked: set[int], recovered: set[int]) -> None:
    steps = rollyard.Run(config, stations=lambda past: stations(config, asked, recovered)).steps()
    try:
        async for _ in steps:
            pass
    finally:
        await steps.aclose()


def config(tmp_path: Path, steps: int, staleness: int, rollover: Rollover) -> Config:
    """Two groups a step, two members a group."""
    placement = "async" if staleness else "separate"
    work = Work(1.0, steps=steps, groups=2, size=2, staleness=staleness)
    made = config_of(placement, rollover, work, tmp_path)
    out = RunConfig(**made.run.model_dump() | {"out": str(tmp_path / "run")})
    shared = ExchangeConfig(folder=str(tmp_path / "shared"), limit_s=600)
    return made.model_copy(update={"exchange": shared, "run": out})
