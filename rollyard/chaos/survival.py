"""What came of each fault (PURE): what was lost for it, what was done again, what went on, and how long that took.

A member counts once for a fault that met it while it was on its way there:

    lost        it was dropped, or got no verdict
    repeated    tokens of it that had come were not used: they are written anew
    recovered   it went on with all its tokens, or came through
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from rollyard.events import (
    BatchTrained,
    Checkpointed,
    Drop,
    EngineDown,
    EngineId,
    EngineResumed,
    Event,
    Finish,
    Generate,
    Instruction,
    Keep,
    Retire,
    Score,
    Scored,
    SegmentArrived,
    Train,
)
from rollyard.lives import Reuse
from rollyard.types import Begun, Completion, DropReason, FinishReason, Partial

Key = tuple[int, int]  # group, member
CUT = (None, FinishReason.ABORT, FinishReason.ERROR)  # a completion that goes on


@dataclass(frozen=True, slots=True)
class Tally:
    """Members, and tokens of their completions."""

    members: int = 0
    tokens: int = 0

    def plus(self, tokens: int) -> Tally:
        return Tally(self.members + 1, self.tokens + tokens)


NONE = Tally()


@dataclass(frozen=True, slots=True)
class Survived:
    """One fault that was carried out. `delay_s` is None as long as what it hit is not in service again."""

    fault: int  # its number in the file, from 1
    what: str
    process: str
    life: int  # of the run, from 0
    at_s: float  # seconds since that life began
    met: Tally = NONE  # what was on its way there
    lost: Tally = NONE
    repeated: Tally = NONE
    recovered: Tally = NONE
    delay_s: float | None = None
    outcome: str = ""


@dataclass(slots=True, eq=False)
class Record:
    """A fault, and what is still to be seen of it."""

    survived: Survived
    kind: str  # of the process
    engine: EngineId  # which engine it is, if it is one
    began: float  # seconds, on a clock that goes on when the run does not
    met: dict[Key, int]  # [group, member]: tokens that had come, of members of which nothing more is known
    lasts: bool = True  # it goes on, or nobody has heard of it yet
    step: int = 0  # trained steps

    def note(self, key: Key, outcome: str, tokens: int) -> None:
        """What became of a member that it met."""
        if self.met.pop(key, None) is not None:
            self.survived = replace(self.survived, **{outcome: getattr(self.survived, outcome).plus(tokens)})

    def goes_on(self, key: Key, kept: int) -> None:
        """A member is written on, after so many tokens."""
        had = self.met.get(key, 0)
        self.note(key, *(("repeated", had - kept) if had > kept else ("recovered", kept)))

    def settle(self, outcome: str, now: float | None = None) -> None:
        """What it hit is in service again, or (without a time) never will be. Only the first is kept."""
        if not self.survived.outcome:
            delay_s = None if now is None else now - self.began
            self.survived = replace(self.survived, outcome=outcome, delay_s=delay_s)

    def goes_on_with_all(self, now: float) -> None:
        """It stood still, and so did what it met."""
        for key, tokens in list(self.met.items()):
            self.note(key, "recovered", tokens)
        self.settle("it went on", now)

    @property
    def ends(self) -> bool:
        """The run ends with such a fault, and its effects are seen in its next life."""
        return self.survived.what == "kill" and self.kind in ("run", "trainer")


@dataclass(slots=True)
class OnItsWay:
    """Tokens of each member, where it is."""

    engines: dict[EngineId, dict[Key, int]] = field(default_factory=dict)
    judged: dict[Key, int] = field(default_factory=dict)
    done: dict[Key, int] = field(default_factory=dict)  # judged, and not in a batch yet
    step: int = 0  # trained

    def at(self, kind: str, engine: EngineId) -> dict[Key, int]:
        """What a process has; where it is not known which of several, what all of them have."""
        if kind == "engine":
            return dict(self.engines.get(engine, {}))
        if kind == "reward":
            return dict(self.judged)
        if kind not in ("run", "trainer"):
            return {}
        return {key: tokens for each in (*self.engines.values(), self.judged, self.done) for key, tokens in each.items()}

    def take(self, entry: Event | Instruction) -> None:
        match entry:
            case Generate(engine, request):
                self.engines.setdefault(engine, {})[request.id[:2]] = len(request.written_ids)
            case SegmentArrived(engine, segment):
                held, key = self.engines.get(engine, {}), segment.request[:2]
                if key in held:
                    held[key] += len(segment.token_ids)
                if segment.finish is not None:
                    held.pop(key, None)
            case EngineDown(engine):
                self.engines.pop(engine, None)
            case Score(_, done):
                self.judged[done.group, done.member] = len(done.token_ids)
            case Scored(group, member):
                self.done[group, member] = self.judged.pop((group, member), 0)
            case Drop(group, member):
                self._forget({group}, member)
            case Train(_, groups):
                self._forget({group.id for group in groups}, None)
            case BatchTrained(version):
                self.step = version.step

    def _forget(self, groups: set[int], member: int | None) -> None:
        for found in (self.judged, self.done):
            for key in [key for key in found if key[0] in groups and member in (None, key[1])]:
                del found[key]


class Survival:
    """Sees what follows from faults in what the run's core hears and says.

    Args:
        before: of earlier lives; of those that ended one, this life shows what came.
    """

    def __init__(self, before: Sequence[Record] = ()) -> None:
        self.records = list(before)
        self._way = OnItsWay()

    def struck(self, survived: Survived, kind: str, engine: EngineId, now: float) -> Record:
        """A fault is about to be carried out on a process of this kind."""
        met = self._way.at(kind, engine)
        tally = Tally(len(met), sum(met.values()))
        found = Record(replace(survived, met=tally), kind, engine, now, met, step=self._way.step)
        self.records.append(found)
        return found

    def begin(self, step: int) -> None:
        """This life begins, with so many steps trained: it shows what came of what ended the one before."""
        self._way.step = step
        for record in self.records:
            if record.ends and record.survived.delay_s is None:
                record.survived = replace(record.survived, outcome="")

    def heard(self, entry: Event | Instruction, now: float, life: int) -> None:
        """Faults see an entry before it is noted what it changes."""
        for record in self.records:
            if record.met:
                self._members(record, entry)
            if not record.survived.outcome:
                self._service(record, entry, now, life)
        self._way.take(entry)

    def _members(self, record: Record, entry: Event | Instruction) -> None:
        match entry:
            case Generate(_, request):
                record.goes_on(request.id[:2], len(request.written_ids))
            case SegmentArrived(_, segment) if record.kind == "engine" and segment.finish not in CUT:
                key = segment.request[:2]
                record.note(key, "recovered", record.met.get(key, 0) + len(segment.token_ids))
            case Scored(group, member, reward) if record.kind == "reward":
                key = group, member
                record.note(key, "lost" if reward.value is None else "recovered", record.met.get(key, 0))
            case Drop(group, member, reason) if reason is not DropReason.STOPPED:  # what is stopped is asked again
                for key in [key for key in record.met if key[0] == group and member in (None, key[1])]:
                    record.note(key, "lost", record.met[key])
            case Reuse() | Keep(_, True):
                for key, tokens in _reused(entry):
                    record.goes_on(key, tokens)

    def _service(self, record: Record, entry: Event | Instruction, now: float, life: int) -> None:
        """Is what it hit in service again, or gone for good?"""
        survived = record.survived
        match entry:
            case Finish(cause, failed):
                if not record.ends:
                    record.settle("the run was over")
                elif failed and survived.life == life:
                    record.survived = replace(survived, outcome=f"the run ended: {cause}")
            case Generate() | Train() if record.ends and survived.life < life:
                again = max(record.step - self._way.step, 0)
                record.settle(f"resumed after step {self._way.step}, {again} trained again", now)
            case EngineDown(engine) if engine == record.engine and not record.ends:
                record.lasts = False
            case EngineResumed(engine) | SegmentArrived(engine) if not record.lasts and engine == record.engine:
                record.settle("started again" if survived.what == "kill" else "it went on", now)
            case Retire(engine, True) if engine == record.engine:
                record.settle("the run went on without it")
            case Scored() if record.kind == "reward" and not record.met:
                record.settle("it went on", now)
            case BatchTrained() | Checkpointed() if record.kind == "trainer" and not record.ends and not record.lasts:
                record.goes_on_with_all(now)
            case Event() if record.kind == "run" and not record.ends and not record.lasts:
                record.goes_on_with_all(now)


def _reused(entry: Reuse | Keep) -> Iterator[tuple[Key, int]]:
    """Tokens that an earlier life left, and this one uses."""
    begun = Begun(entry.group.id, entry.group.rollouts) if isinstance(entry, Keep) else entry.begun
    written: list[Completion | Partial] = [*(rollout.completion for rollout in begun.rollouts), *begun.completions]
    yield from (((begun.group, each.member), len(each.token_ids)) for each in [*written, *begun.partials])
