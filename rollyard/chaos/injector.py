"""Carries faults out, and keeps in the run's folder what it did: a run that killed itself is resumed without that fault."""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Protocol, cast

from pydantic import TypeAdapter, ValidationError

from rollyard.chaos.bend import bent
from rollyard.chaos.due import Due
from rollyard.chaos.faults import Fault, How
from rollyard.chaos.survival import Record, Survival, Survived
from rollyard.chaos.victims import Own, Victim
from rollyard.durable import write_file
from rollyard.errors import JournalError
from rollyard.events import EngineId, Event, Instruction
from rollyard.protocols.processes import Process
from rollyard.texts import in_a_line, visible
from rollyard.types import Segment

Launch = Callable[..., Awaitable[Process]]  # of protocols.Launcher
RUN, KEPT = "run", "faults.json"
RECORDS = TypeAdapter(list[tuple[Record, list[tuple[int, int, int]]]])  # each beside what it met: group, member, tokens


class Hittable(Process, Protocol):
    """A channel to a process, with the process itself."""

    @property
    def victim(self) -> Victim: ...


@dataclass(slots=True, eq=False)
class _Target:
    name: str
    kinds: tuple[str, ...]
    engine: EngineId
    victim: Victim
    held: bool = False  # a fault of it is under way

    def kind(self, what: str) -> str:
        """What is seen of a fault. A trainer that is killed ends the run, whatever else is in its process."""
        if self.engine and not ("trainer" in self.kinds and what == "kill"):
            return "engine"
        return self.kinds[0]


class Injector:
    """Faults of one life of a run.

    Args:
        faults: what is to happen.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = tuple(faults)
        self._targets: dict[int, _Target] = {}
        self._numbers = 0
        self._due: Due | None = None  # once this life has begun
        self._survival = Survival()
        self._path, self._life, self._began, self._shift = Path(), 0, 0.0, 0.0
        self._bent: dict[EngineId, How] = {}
        self._random = [Random(f"{fault.seed} {number}") for number, fault in enumerate(faults)]
        self._tasks: set[asyncio.Task[None]] = set()
        self.broke: Callable[[BaseException], None] = _told  # takes what a fault could not do
        self.join(RUN, (RUN,), Own())

    @property
    def survival(self) -> tuple[Survived, ...]:
        """What came of the faults so far, over all lives of the run."""
        return tuple(record.survived for record in self._survival.records)

    # ---------------------------------------------------------------------------------------- who can be hit

    def join(self, name: str, kinds: Sequence[str], victim: Victim, engine: EngineId = "") -> Callable[[], None]:
        """There is such a process, until what is returned is called.

        Args:
            name: what faults may call it.
            kinds: the same; the first says what it is in the end.
            engine: which engine is in it.
        """
        number = self._numbers = self._numbers + 1
        self._targets[number] = _Target(name, tuple(kinds), engine, victim)

        def leave() -> None:
            self._targets.pop(number, None)

        return leave

    def launching(self, launch: Launch, kinds: Sequence[str], name: str = "", engine: EngineId = "") -> Launch:
        """Starts processes that can be hit from then on. See `join`; without a name it is what a process is started with."""

        async def start(*args: Any, **named: Any) -> Process:
            channel = cast(Hittable, await launch(*args, **named))
            leave = self.join(name or named["name"], kinds, channel.victim, engine)
            self._begin(_until_ended(channel, leave))
            return channel

        return start

    def bending(self, engine: EngineId) -> Callable[[tuple[Segment, ...]], tuple[Segment, ...]]:
        """Makes of what an engine wrote what the run gets."""

        def bend(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
            how = self._bent.get(engine)
            return segments if how is None else tuple(bent(segment, how) for segment in segments)

        return bend

    # ----------------------------------------------------------------------------------------------- faults

    def begin(self, folder: Path, life: int = 0, step: int = 0) -> None:
        """The stations are there: from now on faults happen.

        Args:
            folder: of the run.
            life: of the run, from 0.
            step: steps trained in earlier lives.

        Raises JournalError when it cannot be read what happened in earlier lives.
        """
        loop = asyncio.get_running_loop()
        self._path, self._life, self._began, self._shift = folder / KEPT, life, loop.time(), time.time() - loop.time()
        self._survival = Survival(_read(self._path) if life else [])
        self._survival.begin(step)
        done = Counter(survived.fault - 1 for survived in self.survival)
        self._due = Due(self._faults, done, self._began)
        self._begin(self._watch(self._due))

    def heard(self, entries: Iterable[Event | Instruction]) -> None:
        """What the run's core heard and said."""
        if self._due is None:
            return
        now, due = self._now, []
        for entry in entries:
            self._survival.heard(entry, now, self._life)
            due += self._due.heard(entry)
        for number in due:
            self._strike(number)

    async def close(self) -> None:
        """Nothing happens any more, and nobody stands still."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._targets.clear()
        if self._due is not None:
            self._due = None
            self._keep()

    @property
    def _now(self) -> float:
        """Seconds that go on between lives, and do not jump within one."""
        return asyncio.get_running_loop().time() + self._shift

    async def _watch(self, due: Due) -> None:
        """What the clock alone makes due."""
        loop = asyncio.get_running_loop()
        while (at := due.next) < math.inf:
            await asyncio.sleep(at - loop.time())
            for number in due.passed(loop.time()):
                self._strike(number)

    def _strike(self, number: int) -> None:
        """Written down before it happens: it may be the end."""
        fault = self._faults[number]
        found = [each for each in self._targets.values() if fault.which in (each.name, *each.kinds) and not each.held]
        at_s = self._now - self._began - self._shift
        if not found:
            survived = Survived(
                number + 1, fault.what, fault.which, self._life, at_s, outcome="there was no such process just then"
            )
            self._survival.records.append(Record(survived, "", "", self._now, {}))
            return
        target = self._random[number].choice(sorted(found, key=lambda each: each.name))
        survived = Survived(number + 1, fault.what, target.name, self._life, at_s)
        record = self._survival.struck(survived, target.kind(fault.what), target.engine, self._now)
        self._keep()
        if fault.what == "kill":
            target.victim.kill()
        else:
            self._begin(self._last(fault, target, record))

    async def _last(self, fault: Fault, target: _Target, record: Record) -> None:
        """A fault that takes its time."""
        assert fault.for_s is not None
        target.held = True
        try:
            if fault.how is None:
                await target.victim.hold(fault.for_s, 1.0 if fault.factor is None else 1 - 1 / fault.factor)
            else:
                self._bent[target.engine] = fault.how
                await asyncio.sleep(fault.for_s)
        finally:
            target.held = record.lasts = False
            self._bent.pop(target.engine, None)

    def _keep(self) -> None:
        records = [
            (replace(each, met={}), [(*key, tokens) for key, tokens in each.met.items()]) for each in self._survival.records
        ]
        write_file(self._path, RECORDS.dump_json(records, indent=1))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.broke(error)


def _told(error: BaseException) -> None:
    warnings.warn(visible(f"a fault cannot be carried out: {type(error).__name__}: {error}"), RuntimeWarning, stacklevel=2)


async def _until_ended(channel: Process, leave: Callable[[], None]) -> None:
    try:
        await channel.ended()
    finally:
        leave()


def _read(path: Path) -> list[Record]:
    try:
        records = RECORDS.validate_json(path.read_bytes())
    except FileNotFoundError:  # no fault happened in earlier lives
        return []
    except (OSError, ValidationError) as error:
        raise JournalError(f"{path}: what faults came of cannot be read: {in_a_line(error)}") from error
    return [replace(record, met={(group, member): tokens for group, member, tokens in met}) for record, met in records]
