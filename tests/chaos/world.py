"""A whole run on a virtual clock: real loop, ring, conductor, journal, recorder, and the run's real ends of all lines."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from rollyard.bench.placements import SHAPE
from rollyard.chaos.injector import Injector
from rollyard.config import Config
from rollyard.engine.host import serve
from rollyard.engine.remote import RemoteEngine
from rollyard.journal.recover import Past
from rollyard.layers import resolve
from rollyard.protocols.processes import Channel
from rollyard.protocols.rollouts import Engine as RunEngine
from rollyard.protocols.rollouts import Scorer
from rollyard.protocols.training import Trainer as RunTrainer
from rollyard.protocols.weights import Evidence, Handoff, Publisher
from rollyard.resume import NOTHING
from rollyard.reward.function import Takes
from rollyard.reward.host import Source
from rollyard.reward.workers import Crew, InWorkers
from rollyard.stations import Stations
from rollyard.train import host as trainers
from rollyard.train.remote import RemoteTrainer
from rollyard.types import Capabilities, FinishReason, Prompt, WeightVersion
from rollyard.watch.spans import SpanLog
from rollyard.weights import host as weights
from rollyard.weights.remote import RemoteHandoff, RemotePublisher
from tests.chaos.doubles import VOCABULARY, Engine, Known, Prompts, Times, Trainer, judge, judged
from tests.chaos.processes import Clockwork, Hosted, Process

CAPABILITIES = Capabilities(keep=True, sleep=True, noise=True, transports=("shared_memory",))
WINDOW = 4096
LIMIT_S = 60.0
DRAIN_S = 1800.0  # as in runs: what is written takes as long as it takes


Served = Callable[[Clockwork, Channel], Awaitable[None]]  # what a process runs


@dataclass(frozen=True)
class Shape:
    """What a run is like."""

    placement: str = "async"
    engines: int = 2
    slots: int = 4
    steps: int = 4
    groups: int = 2
    size: int = 2
    prompts: int = 12
    held_out: int = 0
    staleness: int = 1
    save: int = 1
    rollover: str = "abort"
    overtaking: str = "allow"
    actors: bool = False  # engines are what stands for actors of a cluster
    restarts: int = 1
    bound: bool = False  # what engines write depends on their weights
    times: Times = field(default_factory=Times)
    options: tuple[tuple[str, object], ...] = ()

    @property
    def halves(self) -> bool:
        return self.placement == "swap"

    def config(self, scratch: Path, **changes: object) -> Config:
        """Of a run in `scratch`."""
        model = scratch / "model"
        if not model.exists():
            model.mkdir()
            (model / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        options: dict[str, object] = {
            "model.path": str(model),
            "prompts.task": "sort",
            "place.placement": self.placement,
            "place.device": "cpu",
            "place.restarts": self.restarts,
            "rollout.groups_per_step": self.groups,
            "rollout.group_size": self.size,
            "rollout.max_tokens": 64,
            "rollout.max_staleness": 0 if self.placement in ("colocated", "separate") else self.staleness,
            "rollout.overtaking": self.overtaking,
            "weights.rollover": self.rollover,
            "weights.canary": False,
            "weights.probe": False,
            "checkpoint.every": self.save,
            "run.steps": self.steps,
            "run.out": str(scratch / "run"),
            "watch.view": "quiet",
        }
        return resolve(environment={}, overrides=options | dict(self.options) | changes).config


@dataclass
class World:
    """The processes of one life of a run."""

    shape: Shape
    scratch: Path
    past: Past = NOTHING
    injector: Injector | None = None
    judge: Callable[[], Scorer] | None = None  # instead of reward workers
    processes: list[Process | Hosted] = field(default_factory=list)
    trainers: list[Trainer] = field(default_factory=list)  # that there were
    engines: dict[str, Engine] = field(default_factory=dict)

    @property
    def weights(self) -> str:
        """What was trained last."""
        return max(self.trainers, key=lambda each: each.version.step).weights if self.trainers else ""

    @property
    def run_folder(self) -> Path:
        return self.scratch / "run"

    def started(self, name: str, kinds: tuple[str, ...], host: Served, silent_s: float = 0, engine: str = "") -> Process | Hosted:
        """A process, which can be hit. `silent_s`: it is an actor."""
        clocks: list[Clockwork] = []

        async def run(channel: Channel, order: bytes) -> None:
            await host(clocks[0], channel)

        made: Process | Hosted = Hosted(name, run, b"", silent_s) if silent_s else Process(name, run, b"")
        clocks.append(made.clock)
        self.processes.append(made)
        if self.injector is not None:
            made.leave = self.injector.join(name, (*kinds, *(("actor",) if silent_s else ())), made, engine)
        return made

    def engine(self, name: str) -> RunEngine:
        """One in a process of its own."""

        async def host(clock: Clockwork, channel: Channel) -> None:
            self.engines[name] = made = Engine(name, self.shape.slots, self.shape.times, clock, bound=self.shape.bound)
            await clock.sleep(self.shape.times.start)
            await serve(made, channel)

        made = self.started(name, ("engine",), host, 5.0 if self.shape.actors else 0, name)
        return self.reached(name, made.actor if isinstance(made, Hosted) else made)

    def reached(self, name: str, channel: Channel) -> RemoteEngine:
        bend = None if self.injector is None else self.injector.bending(name)
        limits = {"start_s": LIMIT_S, "sync_s": LIMIT_S, "drain_s": DRAIN_S}
        return RemoteEngine(name, channel, CAPABILITIES, **limits, alone=not self.shape.halves, bend=bend)

    async def launch(self, name: str, url: str) -> RunEngine:
        return self.engine(name)

    def host(self, name: str, engine: str | None) -> tuple[Process, RunEngine | None]:
        """A process with a trainer, and an engine beside it where it is a half."""

        async def host(clock: Clockwork, channel: Channel) -> None:
            shape, spans = self.shape, SpanLog()
            trainer = Trainer(shape.times, clock, self.past, self.run_folder)
            self.trainers.append(trainer)
            trainers.serve(cast(RunTrainer, trainer), channel, spans)
            weights.serve(cast(Publisher, trainer), None, channel)
            if engine is not None:
                weights.serve_handoff(cast(Handoff, trainer), channel)
                self.engines[engine] = made = Engine(engine, shape.slots, shape.times, clock, bound=shape.bound)
                await serve(made, channel)
                return
            channel.ready()
            await channel.ended()

        made = self.started(name, ("trainer",) if engine is None else ("trainer", "engine"), host, engine=engine or "")
        assert isinstance(made, Process)
        return made, None if engine is None else self.reached(engine, made)

    async def worker(self, target: str, order: bytes, *, name: str, environment: Mapping[str, str]) -> Channel:
        """A reward worker."""
        return self.started(name, ("reward",), partial(judge, self.shape.times))

    def scorer(self, config: Config) -> Scorer:
        if self.judge is not None:
            return self.judge()
        crew = Crew(config.reward, self.worker, [(Source("judged", load="tests.chaos.doubles:judged"), b"")], self.scratch)
        workers = InWorkers("judged", 0, Takes.of(judged), {}, crew, config.rollout.max_tokens)
        workers.start()
        return workers

    def stations(self, config: Config, past: Past) -> Stations:
        """All of them."""
        self.past = past
        names = [f"engine-{number}" for number in range(2 if self.shape.halves else self.shape.engines)]
        build = {"colocated": self.here, "swap": self.in_halves}.get(self.shape.placement, self.in_pools)
        return Stations(
            source=Prompts(self.shape.prompts, past.done),
            held_out=self.held_out(),
            scorer=self.scorer(config),
            text=said,
            window=WINDOW,
            size=4,
            ranks=1,
            evidence=cast(Evidence, Known()),
            vocabulary=VOCABULARY,
            **build(names),
        )

    def held_out(self) -> tuple[Prompt, ...]:
        return tuple(Prompt(1000 + number, number, (7, number + 1), f"h{number}") for number in range(self.shape.held_out))

    def here(self, names: list[str]) -> dict[str, Any]:
        """In the run's own process: nothing of it is lost alone."""
        clock = Clockwork()
        trainer = Trainer(self.shape.times, clock, self.past, self.run_folder)
        engines = {name: Engine(name, self.shape.slots, self.shape.times, clock, bound=self.shape.bound) for name in names}
        self.trainers, self.engines = [trainer], engines
        starts = tuple(engine.start for engine in engines.values())
        publishers = dict.fromkeys(names, trainer)
        return {"engines": engines, "trainers": {None: trainer}, "publishers": publishers, "handoffs": {}, "starts": starts}

    def in_pools(self, names: list[str]) -> dict[str, Any]:
        """Engines and a trainer in processes of their own."""
        process, _ = self.host("trainer-0", None)
        trainer, engines = _Trainer(process, self.past.version), {name: self.engine(name) for name in names}
        starts = (trainer.start, *(engine.start for engine in engines.values()))
        publishers = dict.fromkeys(names, RemotePublisher(process, LIMIT_S))
        found = {"engines": engines, "trainers": {None: trainer}, "publishers": publishers, "handoffs": {}, "starts": starts}
        return found | {"launch": self.launch}

    def in_halves(self, names: list[str]) -> dict[str, Any]:
        """Processes with a trainer and an engine each."""
        hosts = {name: self.host(f"half {name}", name) for name in names}
        trainers = {name: _Trainer(process, self.past.version) for name, (process, _) in hosts.items()}
        engines = {name: cast(RunEngine, engine) for name, (_, engine) in hosts.items()}
        return {
            "engines": engines,
            "trainers": trainers,
            "publishers": {name: RemotePublisher(process, LIMIT_S) for name, (process, _) in hosts.items()},
            "handoffs": {name: RemoteHandoff(process, LIMIT_S) for name, (process, _) in hosts.items()},
            "starts": (*(each.start for each in trainers.values()), *(each.start for each in engines.values())),
        }


def said(ids: Sequence[int], stop: tuple[str, ...], finish: FinishReason) -> str:
    """The text of an answer."""
    return " ".join(map(str, ids))


class _Trainer(RemoteTrainer):
    """Closes its process, for which a builder stands elsewhere."""

    def __init__(self, process: Process, version: WeightVersion) -> None:
        super().__init__(process.name, process, version, start_s=LIMIT_S, step_s=LIMIT_S)
        self._process = process
        process.ready()

    async def close(self) -> None:
        await self._process.close()
