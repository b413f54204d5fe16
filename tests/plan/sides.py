"""One workload under the real loop, and under the simulator: what each conductor was told and said, step by step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, cast

import rollyard
from rollyard.bench import virtual
from rollyard.bench.doubles import DoubleHandoff, DoublePublisher, DoubleTrainer, Meter
from rollyard.bench.placements import SHAPE
from rollyard.config import Config
from rollyard.engine.fake import FakeEngine, OnLoad, Script
from rollyard.errors import EngineLost
from rollyard.events import EngineId, Event, Instruction, WakePart
from rollyard.journal.record import Unkept
from rollyard.journal.recover import Past
from rollyard.layers import resolve
from rollyard.plan.simulate import Play, Simulated
from rollyard.plan.world import TRAINERS
from rollyard.plan.world import Stations as Modelled
from rollyard.protocols.devices import Spans
from rollyard.protocols.training import Trainer
from rollyard.protocols.weights import Answers, Handoff, Publisher
from rollyard.stations import Stations
from rollyard.types import (
    Activity,
    Baseline,
    Completion,
    Finding,
    Group,
    Handed,
    Judged,
    Manifest,
    Probed,
    Prompt,
    Reward,
    Sent,
    Verdict,
    WeightVersion,
)
from rollyard.watch.report import Report
from rollyard.watch.spans import SpanLog
from tests.plan.compared import compare
from tests.plan.twin import TwinEngine

WINDOW = 4096
LOST = "its node failed"


@dataclass(frozen=True)
class Case:
    """What a run is like. No two things take the same time, so that nothing happens at the same moment by chance."""

    placement: str = "async"
    rollover: str = "drain"
    seed: int = 0
    engines: int = 3
    slots: int = 4
    steps: int = 4
    groups: int = 3
    size: int = 2
    staleness: int = 1
    prompts: int = 10_000
    longest: int = 24
    cap: int = 20
    judge_s: float = 0.0
    workers: int = 2
    copy_s: float = 0.03
    retries: int = 1
    refusals: int = 0  # of a hundred loads
    losses: tuple[tuple[float, int], ...] = ()  # when, and which engine
    changes: tuple[tuple[int, int], ...] = ()  # after which step, and how many come or leave
    restarts: int = 1
    held_out: int = 0
    canary: bool = False
    probe_s: float = 0.0  # 0: nothing is probed
    sleep_s: float = 0.0
    wake_s: float = 0.0
    sent_bytes: int = 0  # where weights are sent
    options: tuple[tuple[str, object], ...] = ()

    def config(self, scratch: Path) -> Config:
        model = scratch / "model"
        model.mkdir(exist_ok=True)
        (model / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
        apart = self.placement in ("separate", "async")
        options: dict[str, object] = {
            "model.path": str(model),
            "prompts.task": "sort",
            "place.placement": self.placement,
            "place.device": "cpu",
            "place.restarts": self.restarts,
            "engine.slots": self.slots,
            "rollout.groups_per_step": self.groups,
            "rollout.group_size": self.size,
            "rollout.max_tokens": self.cap,
            "rollout.max_staleness": {"async": self.staleness, "swap": 1}.get(self.placement, 0),
            "weights.rollover": self.rollover if apart else "drain",
            "weights.retries": self.retries,
            "weights.canary": self.canary,
            "weights.probe": self.probe_s > 0,
            "run.steps": self.steps,
            "run.seed": self.seed,
            "run.out": str(scratch / "run"),
            "watch.view": "quiet",
        }
        return resolve(environment={}, overrides=options | dict(self.options)).config

    @property
    def several(self) -> int:
        return 2 if self.placement == "swap" else self.engines

    def length(self, group: int, member: int) -> int:
        share = Random(f"{self.seed}/{group}").random() + Random(f"{self.seed}/{group}/{member}").random()
        return 1 + int(share / 2 * self.longest)

    def jitter(self, *what: object) -> float:
        """A little longer, so that no two are alike."""
        return 1 + 0.2 * Random(f"{self.seed}/{what}").random()

    @property
    def moments(self) -> list[tuple[float, int]]:
        """Of losses."""
        return [(at * self.jitter("lost", which), number) for which, (at, number) in enumerate(self.losses)]

    def token_s(self, engine: EngineId) -> float:
        return 0.05 * self.jitter("token", engine)

    def score_of(self, done: Completion) -> float:
        return self.judge_s * self.jitter("score", done.group, done.member)


@dataclass
class Refusals:
    """Loads that fail: which, follows from the engine, its life, the version, and how often that life has tried it.

    One that is lost at a load has tried it in the loop and not in the simulator, where that is asked at the end: this is the end
    of its life, so nothing hangs on it.
    """

    case: Case
    lives: dict[EngineId, int] = field(default_factory=dict)
    tried: dict[tuple[EngineId, int, int], int] = field(default_factory=dict)

    def begins(self, engine: EngineId) -> None:
        self.lives[engine] = self.lives.get(engine, 0) + 1

    def refuses(self, engine: EngineId, version: WeightVersion) -> bool:
        key = engine, version.step, self.lives.get(engine, 0)
        self.tried[key] = self.tried.get(key, 0) + 1
        return Random(f"{self.case.seed}/{key}/{self.tried[key]}").random() * 100 < self.case.refusals


class Times:
    """How long things take (plan.world.Takes)."""

    def __init__(self, case: Case) -> None:
        self._case, self._refusals = case, Refusals(case)
        self.copy_s = case.copy_s if case.placement in ("separate", "async") else 0.0
        self.deliver_s, self.handoff_s, self.checkpoint_s = 0.071, 0.23, 0.13
        self.sent_bytes = case.sent_bytes if case.placement in ("separate", "async") else 0

    def prepare_s(self, engine: EngineId) -> float:
        return 0.06 * self._case.jitter("prepare", engine)

    def load_s(self, engine: EngineId) -> float:
        return 0.04 * self._case.jitter("load", engine)

    def probe_s(self, engine: EngineId) -> float:
        return self._case.probe_s * self._case.jitter("probe", engine)

    def sleep_s(self, engine: EngineId) -> float:
        return self._case.sleep_s * self._case.jitter("sleep", engine)

    def wake_s(self, engine: EngineId) -> float:
        return self._case.wake_s * self._case.jitter("wake", engine)

    def start_s(self, engine: EngineId) -> float:
        """Told once for each start."""
        self._refusals.begins(engine)
        return 0.7 * self._case.jitter("start", engine)

    def train_s(self, groups: Sequence[Group]) -> float:
        return 0.31 + 0.0007 * sum(len(done.completion.token_ids) for group in groups for done in group.rollouts)

    def score_s(self, completion: Completion) -> float:
        return self._case.score_of(completion)

    def refuses(self, engine: EngineId, version: WeightVersion) -> str:
        if not self._refusals.refuses(engine, version):
            return ""
        return f"engine {engine} did not take version {tuple(version)}: it was told to refuse"


class Source:
    """So many prompts (protocols.PromptSource)."""

    def __init__(self, count: int) -> None:
        self._count, self.cursor = count, 0

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        begin, self.cursor = self.cursor, min(self.cursor + count, self._count)
        found = tuple(Prompt(at, at % 7, (1,) * (2 + at % 5), "") for at in range(begin, self.cursor))
        return found, self.cursor == self._count


def held_out(case: Case) -> tuple[Prompt, ...]:
    return tuple(Prompt(1000 + number, number, (1,) * 3, "") for number in range(case.held_out))


def verdict(done: Completion) -> Reward:
    return Reward(float(done.member % 2))


@dataclass
class Side:
    """What one of them came to."""

    steps: list[tuple[float, list[Event], list[Instruction]]] = field(default_factory=list)
    report: Report | None = None
    simulated: Simulated | None = None


def simulated(case: Case, scratch: Path) -> Side:
    side, times = Side(), Times(case)

    def make(name: EngineId, spans: SpanLog) -> TwinEngine:
        return TwinEngine(case.slots, case.token_s(name), case.length, spans)

    def heard(now: float, events: Sequence[Event], instructions: Sequence[Instruction]) -> None:
        side.steps.append((now, list(events), list(instructions)))

    source = Source(case.prompts)
    models = Modelled(case.several, make, times, source, verdict, case.workers, WINDOW, held_out=held_out(case), judged=True)
    play = Play(case.config(scratch), models, heard=heard)
    for at, number in case.moments:
        play.clock.at(at, lambda number=number: play.world.lose(f"engine-{number}", LOST))
    play.world.coming.plan(dict(case.changes))
    side.simulated = play.run()
    side.report = side.simulated.report
    return side


def now() -> float:
    return asyncio.get_running_loop().time()


class Engine(FakeEngine):
    """Weights take their time to it, and now and then it does not take them."""

    def __init__(self, name: EngineId, case: Case, times: Times) -> None:
        token_s, load_s = case.token_s(name), times.load_s(name)

        def script(request: Any) -> Script:
            return Script((1,) * case.length(*request.id[:2]))

        super().__init__(name, slots=case.slots, script=script, token_s=token_s, load_s=load_s, window=WINDOW, clock=now)
        self._times, self.resumed = times, -1.0

    async def prepare(self, manifest: Manifest) -> None:
        with self.spans.doing(Activity.SYNC, "prepare"):
            await asyncio.sleep(self._times.prepare_s(self.id))
        await super().prepare(manifest)

    async def load(self, version: WeightVersion) -> None:
        self.on_load = OnLoad.REFUSE if self._times.refuses(self.id, version) else OnLoad.TAKE
        await super().load(version)

    async def resume(self) -> None:
        self.resumed = now()
        await super().resume()

    async def sleep(self) -> None:
        with self.spans.doing(Activity.SYNC, "sleep"):
            if seconds := self._times.sleep_s(self.id):
                await asyncio.sleep(seconds)
            await super().sleep()

    async def wake(self, part: WakePart) -> None:
        with self.spans.doing(Activity.SYNC, "wake"):
            if part is WakePart.WEIGHTS and (seconds := self._times.wake_s(self.id)):
                await asyncio.sleep(seconds)
            await super().wake(part)


class Learns(DoubleTrainer):
    """Notes what it does on some devices."""

    def __init__(self, times: Times, devices: Sequence[Spans]) -> None:
        super().__init__(0.0, Meter())
        self._times, self._devices = times, devices

    async def train(self, shards: Any) -> Any:
        tokens = sum(sum(sample.mask) for shard in shards for sample in shard.samples)
        self._step_s = 0.31 + 0.0007 * tokens
        with doing(self._devices, Activity.TRAIN, "step"):
            return await super().train(shards)

    async def save(self, folder: Path) -> None:
        with doing(self._devices, Activity.CHECKPOINT):
            await asyncio.sleep(self._times.checkpoint_s)
        await super().save(folder)


class Proves:
    """What a sound engine would show, of which nothing is asked (protocols.Evidence)."""

    def __init__(self, times: Times, engines: Mapping[EngineId, Engine]) -> None:
        self._times, self._engines = times, engines

    async def prompts(self) -> tuple[tuple[int, ...], ...]:
        return ()

    async def published(self, version: WeightVersion, engines: Sequence[EngineId]) -> None:
        """All are sound."""

    async def check(self, engine: EngineId, answers: Answers) -> Probed:
        one, begin = self._engines[engine], self._engines[engine].spans.now()
        stands = one.resumed == now()
        await asyncio.sleep(self._times.probe_s(engine))
        if one._cause:
            raise EngineLost(one._cause)
        if stands:
            one.spans.add(Activity.SYNC, begin, one.spans.now(), "probe")
        return Probed(Verdict.VERIFIED, 0.0, 1.0)

    async def begin(self, answers: Mapping[EngineId, Answers]) -> Baseline:
        await self._ask(answers)
        return Baseline(("one",), dict.fromkeys(answers, 0.0))

    async def move(self, attempt: int, names: Sequence[str]) -> None:
        """It takes no time."""

    async def judge(self, answers: Mapping[EngineId, Answers]) -> Judged:
        await self._ask(answers)
        return Judged(dict.fromkeys(answers, Finding(0.0, 1.0)), ())

    async def restore(self) -> None:
        """It takes no time."""

    async def returned(self, answers: Mapping[EngineId, Answers]) -> Mapping[EngineId, Finding]:
        await self._ask(answers)
        return dict.fromkeys(answers, Finding(0.0, 1.0))

    async def _ask(self, engines: Iterable[EngineId]) -> None:
        """One after the other."""
        if seconds := sum(map(self._times.probe_s, engines)):
            await asyncio.sleep(seconds)


class Publishes(DoublePublisher):
    def __init__(self, times: Times, device: Spans) -> None:
        super().__init__(times.copy_s, times.deliver_s)
        self._device, self._sent = device, times.sent_bytes

    async def deliver(self) -> Sent | None:
        await super().deliver()
        return Sent(self._sent) if self._sent else None

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        with self._device.doing(Activity.SYNC, "publish"):
            return await super().publish(version, engines)


class Hands(DoubleHandoff):
    def __init__(self, times: Times, device: Spans) -> None:
        super().__init__(times.handoff_s)
        self._device = device

    async def given(self) -> None:
        with self._device.doing(Activity.SYNC, "handoff"):
            await super().given()

    async def take(self, manifest: Manifest) -> Handed:
        with self._device.doing(Activity.SYNC, "handoff"):
            return await super().take(manifest)


@contextmanager
def doing(devices: Sequence[Spans], activity: Activity, what: str = "") -> Iterator[None]:
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(device.doing(activity, what))
        yield


class Judge:
    def __init__(self, case: Case) -> None:
        self._case, self._places = case, asyncio.Semaphore(case.workers)

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        if self._case.judge_s:
            async with self._places:
                await asyncio.sleep(self._case.score_of(completion))
        return verdict(completion)

    async def close(self) -> None:
        """Nothing is open."""


def stations(case: Case, times: Times) -> Stations:
    names = [f"engine-{number}" for number in range(case.several)]
    engines = {name: Engine(name, case, times) for name in names}
    known = dict(engines)
    apart = case.placement in ("separate", "async")
    halves: list[EngineId | None] = [*names] if case.placement == "swap" else [None]
    own = SpanLog(lambda: round(now() * 1e9))
    devices = {name: own if apart else engine.spans for name, engine in engines.items()}
    trainers: dict[EngineId | None, Trainer] = {
        half: Learns(times, [own] if apart else [devices[half]] if half else [*devices.values()]) for half in halves
    }
    publishers: dict[EngineId, Publisher]
    if case.placement == "swap":
        publishers = {name: Publishes(times, devices[name]) for name in names}
    else:
        publishers = dict.fromkeys(names, Publishes(times, own))
    handoffs: dict[EngineId, Handoff] = {name: Hands(times, devices[name]) for name in names}

    async def launch(name: EngineId, url: str) -> Engine:
        await asyncio.sleep(times.start_s(name))
        known[name] = Engine(name, case, times)
        return known[name]

    return Stations(
        source=Source(case.prompts),
        held_out=held_out(case),
        scorer=Judge(case),
        text=lambda ids, stop, finish: "",
        window=WINDOW,
        size=1,
        engines=cast(Any, engines),
        trainers=trainers,
        ranks=1,
        publishers=publishers,
        evidence=Proves(times, known),
        handoffs=handoffs if case.placement == "swap" else {},
        starts=tuple(engine.start for engine in engines.values()),
        launch=cast(Any, launch) if apart else None,
        spans=(
            *((name, "engine", engine.spans) for name, engine in engines.items()),
            *([(TRAINERS, "trainer", own)] if apart else [(f"{TRAINERS} of {name}", "trainer", devices[name]) for name in names]),
        ),
    )


def real(case: Case, scratch: Path) -> Side:
    side, made = Side(), list[Stations]()

    class Heard(Unkept):
        def record_step(self, entries: Any) -> None:
            events = [entry for entry in entries if isinstance(entry, Event)]
            side.steps.append((now(), events, [entry for entry in entries if isinstance(entry, Instruction)]))

    def build(past: Past) -> Stations:
        made.append(stations(case, Times(case)))
        return made[0]

    run = rollyard.Run(case.config(scratch), stations=build, journal=Heard)

    def lose(number: int) -> None:
        engine = cast(Engine | None, made[0].engines.get(f"engine-{number}"))
        if engine is not None and not engine._cause and not engine._closed:
            engine.die(LOST)

    async def whole() -> None:
        loop, changes = asyncio.get_running_loop(), dict(case.changes)
        for at, number in case.moments:
            loop.call_at(at, lose, number)
        async for step in run:
            for _ in range(changes.get(step.step, 0)):
                run.add_engine()
            for _ in range(-changes.get(step.step, 0)):
                let_go()

    def let_go() -> None:
        fleet = run._going.fleet
        staying = fleet._conductor.staying - fleet._leaving.engines
        if len(staying) > 1:
            run.remove_engine(max(staying, key=lambda each: int(each.rpartition("-")[2])))

    with suppress(rollyard.RunFailed):
        virtual.run(whole())
    side.report = run.report
    return side


def same(case: Case, scratch: Path) -> tuple[Side, Side]:
    """Both, held against each other. Raises AssertionError."""
    one, other = real(case, scratch), simulated(case, scratch)
    compare(one, other)
    return one, other
