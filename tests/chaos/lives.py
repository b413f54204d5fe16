"""Lives of a run in a chaos world, and what must hold after each, whatever happened."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from rollyard.bench import virtual
from rollyard.chaos.faults import Fault
from rollyard.chaos.injector import Injector
from rollyard.chaos.survival import Survived
from rollyard.errors import RunFailed
from rollyard.events import Event, Instruction
from rollyard.inspect.check import check as check_folder
from rollyard.journal.folder import RunFolder
from rollyard.journal.journal import Journal
from rollyard.journal.reader import JournalReader
from rollyard.journal.recover import Past
from rollyard.loop import Run
from rollyard.protocols.rollouts import Scorer
from rollyard.stations import Stations
from rollyard.types import Group
from rollyard.watch.report import Report
from rollyard.watch.step import Step
from tests.chaos.doubles import STATE
from tests.chaos.world import Shape, World

END_S = 3600.0  # virtual seconds after which a run counts as hanging
ENDED_S = 5.0  # real seconds that threads may take to end
LATE_S = 50.0  # real seconds after which a life in another process does
KILLED, BROKEN = 137, 3  # exit codes: it was killed at a point of writing; something did not hold
At = Callable[[str], None]


@dataclass(frozen=True)
class Where:
    """A point of writing, and at which of the times that it comes there."""

    point: str
    time: int = 1

    def kill(self) -> At:
        """What kills the process there."""
        seen: Counter[str] = Counter()

        def at(point: str) -> None:
            seen[point] += 1
            if point == self.point and seen[point] == self.time:
                os._exit(KILLED)

        return at


class Listening(Injector):
    """Also counts what it hears, and keeps what it heard at once."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        super().__init__(faults)
        self.entries: Counter[str] = Counter()
        self.turns: list[tuple[str, ...]] = []
        self.met: set[str] = set()  # at which kinds something was hit

    def heard(self, entries: Iterable[Event | Instruction]) -> None:
        told, hit = list(entries), len(self.survival)
        self.turns.append(tuple(type(entry).__name__ for entry in told))
        self.entries.update(self.turns[-1])
        super().heard(told)
        if len(self.survival) > hit:
            self.met.update(self.turns[-1])


Meddle = Callable[[World, Step], None]


@dataclass
class Life:
    """One life of a run: how it is to go, and what became of it."""

    shape: Shape
    folder: Path
    faults: Sequence[Fault] = ()
    again: bool = False  # it had lives before
    at: At | None = None  # told the points of writing, which are passed on the run's own thread then
    meddle: Meddle = lambda world, step: None
    options: dict[str, object] = field(default_factory=dict)
    scorer: Callable[[], Scorer] | None = None  # instead of reward workers
    journal: Callable[..., Journal] = Journal

    failed: str = ""  # why, where it did not end as planned
    finished: str = ""  # why there was nothing to do any more
    report: Report | None = None
    steps: list[Step] = field(default_factory=list)
    weights: str = ""  # of the trainer, at its end
    entries: Counter[str] = field(default_factory=Counter)
    turns: list[tuple[str, ...]] = field(default_factory=list)  # kinds of entries, by turn of the core
    met: set[str] = field(default_factory=set)  # kinds of entries at which something was hit
    survival: tuple[Survived, ...] = ()
    seconds: float = 0.0  # virtual

    @property
    def struck(self) -> list[str]:
        """Processes that were hit."""
        return [each.process for each in self.survival if each.outcome != "there was no such process just then"]

    @property
    def batches(self) -> dict[int, tuple[Group, ...]]:
        """What each step was trained on."""
        return {step.step - 1: step.groups for step in self.steps}

    def live(self) -> Life:
        """It, and what holds after any."""
        with leaving_nothing():
            virtual.run(self._live())
        check(self)
        return self

    def killed(self) -> bool:
        """It, in a process of its own. Whether that was killed."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads; the child starts none of theirs
            child = os.fork()
        if not child:
            code = BROKEN
            try:
                self.live()
                code = 0
            except BaseException:  # noqa: BLE001 (it is printed, and the parent fails)
                traceback.print_exc()
            finally:
                os._exit(code)
        code = _ended(child)
        assert code in (0, KILLED, -signal.SIGKILL), "a life did not hold what it should: see above"
        return code != 0

    async def _live(self) -> None:
        injector = Listening(self.faults)
        world = World(self.shape, self.folder, injector=injector, judge=self.scorer)
        run = self._run(world)
        run.injector = injector
        try:
            async with asyncio.timeout(END_S):
                async for step in run:
                    self.steps.append(step)
                    self.meddle(world, step)
        except RunFailed as error:
            self.failed = str(error)
        except TimeoutError:
            raise AssertionError(f"no end in sight: {injector.entries}") from None
        except Exception as error:  # noqa: BLE001 (what ended the run stands in its report)
            self.failed = f"{type(error).__name__}: {error}"
        self.report, self.entries, self.survival = run.report, injector.entries, injector.survival
        self.turns, self.met = injector.turns, injector.met
        self.seconds = asyncio.get_running_loop().time()
        self.finished, self.weights = run.finished, world.weights
        if run.finished:
            newest = max((self.folder / "run" / "checkpoints").iterdir(), key=lambda each: each.name)
            self.weights = json.loads((newest / STATE).read_text())["weights"]
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left, f"tasks are left: {left}; {self.failed}"
        assert not any(process.alive for process in world.processes), "processes are left"

    def _run(self, world: World) -> Run:
        config = self.shape.config(self.folder, **self.options)

        def stations(past: Past) -> Stations:
            return world.stations(config, past)

        if self.again:
            return Run.resume(world.run_folder, stations=stations, at=self.at, journal=self.journal)
        return Run(config, stations=stations, at=self.at, journal=self.journal)


def _ended(child: int) -> int:
    """Its exit code; it is killed when it takes too long."""
    late = threading.Timer(LATE_S, os.kill, (child, signal.SIGABRT))
    late.start()
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    finally:
        late.cancel()


@contextmanager
def leaving_nothing(*, collected: bool = False) -> Iterator[None]:
    """No thread, open file or shared memory is left. `collected`: but for what only waits to be collected."""

    def there() -> tuple[set[str], int, int]:
        found = set()
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                found.add(f"{descriptor} {os.readlink(f'/proc/self/fd/{descriptor}')}")
            except FileNotFoundError:  # that of the listing itself
                continue
        return found, threading.active_count(), Path("/proc/self/maps").read_text().count("memfd:rollyard")

    before = there()
    yield
    if collected:
        gc.collect()
    until = time.monotonic() + ENDED_S
    while threading.active_count() > before[1] and time.monotonic() < until:
        time.sleep(0.001)  # a thread that was told to end takes a moment
    files, threads, memory = there()
    assert not files - before[0], f"files are left open: {files - before[0]}"
    assert threads <= before[1], f"threads are left: {threading.enumerate()}"
    assert memory <= before[2], "shared memory is left"


def check(life: Life) -> None:
    """Whatever happened: nothing lost without a reason, nothing too old, nothing twice."""
    check_journal(life)
    if life.finished:
        return
    report = life.report
    if report is None:  # its own end could not be written either
        assert "full" in life.failed, life.failed
        return
    for counts in (report.prompts, report.members):
        assert counts.admitted == counts.trained + sum(counts.dropped.values()), counts
    ledger = report.tokens
    assert ledger.generated == ledger.trained + sum(ledger.dropped.values()) + ledger.live, ledger
    limit = {"colocated": 0, "separate": 0}.get(life.shape.placement, life.shape.staleness)
    seen: set[int] = set()
    for version, groups in life.batches.items():
        for group in groups:
            assert group.id not in seen, f"prompt {group.id} is trained twice"
            seen.add(group.id)
            for rollout in group.rollouts:
                done = rollout.completion
                assert sum(span.tokens for span in done.spans) == len(done.token_ids) == len(done.logprobs)
                assert all(version - span.version.step <= limit for span in done.spans), (version, done.spans)
    if not life.failed:
        assert report.steps == life.shape.steps, report.finished


def check_journal(life: Life) -> None:
    """The file is whole, and of all lives together each prompt was trained once."""
    folder = RunFolder(life.folder / "run")
    assert not [found for found in check_folder(folder) if not found.sound]
    with JournalReader(folder.journal) as reader:
        taken: dict[int, list[int]] = {}
        for step, group in reader.query(TAKEN):
            taken.setdefault(step, []).append(group)
        saved = max((step for (step,) in reader.query("SELECT version_step FROM checkpoints")), default=0)
        trained_steps = {step for (step,) in reader.query("SELECT step FROM lineage_batches")}
    trained = [group for groups in taken.values() for group in groups]
    assert len(trained) == len(set(trained)), f"a prompt is in two batches: {taken}"
    assert trained_steps >= set(range(saved)), "a checkpoint has a batch that was not trained, as the journal has it"
    told = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] if saved else []
    assert told == list(range(1, len(told) + 1)) and len(told) >= saved, "the metrics have not each step once"
    if not life.failed:
        assert sorted(taken) == list(range(life.shape.steps))


TAKEN = """
    SELECT step, group_id FROM batch_groups b
    WHERE incarnation = (SELECT max(incarnation) FROM batches WHERE step = b.step)"""


@cache
def uninterrupted(shape: Shape) -> Life:
    """The same run when nothing happens to it."""
    with TemporaryDirectory() as folder:
        life = Life(shape, Path(folder)).live()
    assert not life.failed
    return life


@dataclass(frozen=True)
class Moment:
    """The n-th entry of a kind, and all kinds that the run's core hears and says in that turn: a fault at any is the same."""

    kind: str
    count: int
    kinds: frozenset[str]


def moments(shape: Shape, random: Random) -> Iterator[Moment]:
    """Random ones at which each kind of entry of that run is met."""
    turns, left = uninterrupted(shape).turns, dict(sorted(uninterrupted(shape).entries.items()))
    while left:
        kind = min(left, key=lambda each: left[each])  # what happens seldom, as more happens with it
        chosen = random.choice([number for number, turn in enumerate(turns) if kind in turn])
        count = 1 + sum(turn.count(kind) for turn in turns[:chosen])
        yield Moment(kind, count, frozenset(turns[chosen]))
        left = {each: times for each, times in left.items() if each not in turns[chosen]}


@cache
def points(shape: Shape) -> Counter[str]:
    """Of writing, in that run: how often each is passed."""
    found: Counter[str] = Counter()
    with TemporaryDirectory() as folder:
        life = Life(shape, Path(folder), at=lambda point: found.update([point])).live()
    assert life.weights == uninterrupted(shape).weights
    return found
