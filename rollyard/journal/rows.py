"""What the conductor saw and said, as rows of the journal's tables."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rollyard.events import (
    Admit,
    BatchTrained,
    Drop,
    EngineDown,
    EngineLoaded,
    EngineUp,
    Event,
    Finish,
    Generate,
    Instruction,
    Keep,
    Published,
    RequestFailed,
    Retire,
    Score,
    Scored,
    Train,
)
from rollyard.fitness import Unwrite
from rollyard.journal.codec import (
    as_float,
    checksum,
    pack_floats,
    pack_ids,
    pack_json,
    pack_list,
    pack_number,
    pack_parts,
    pack_spans,
    pack_turns,
)
from rollyard.journal.partials import Key, Unfinisheds
from rollyard.journal.schema import WRITES
from rollyard.lives import Reuse, Wrote
from rollyard.texts import clean
from rollyard.types import Completion, DropReason, Partial, Reward, Segment, WeightVersion

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Began:
    """This life of the run begins here."""

    version: WeightVersion


@dataclass(frozen=True, slots=True)
class Judged:
    """A version was evaluated."""

    version: WeightVersion
    mean_reward: float | None
    samples: int
    unscored: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete on disk."""

    version: WeightVersion
    folder: str
    prompt_cursor: int
    counters: Mapping[str, object]


Entry = Event | Instruction | Began | Judged | Saved


class Rows:
    """Rows that are not written yet, by table.

    Args:
        incarnation: in which they are written.
    """

    def __init__(self, incarnation: int) -> None:
        self._incarnation = incarnation
        self.tables: dict[str, list[Row]] = {table: [] for table in WRITES}
        self.unfinished = Unfinisheds()
        self._later: list[Callable[[], None]] = []  # what a step says of unfinished members, once all of it is rows
        self._lost = set[int]()  # groups of steps that were left out: of them nothing more can be said
        self._handlers: dict[type[Entry], Callable[[Any, float], None]] = {
            Began: lambda told, now: self.tables["beginnings"].append((*told.version, self._incarnation)),
            Judged: self._on_judged,
            Saved: self._on_saved,
            Admit: self._on_admit,
            Wrote: self._on_wrote,
            Generate: self._on_generate,
            Unwrite: lambda told, now: self._goes_on((told.group, told.member), told.tokens),
            Score: lambda told, now: self._completion(told.completion, now),
            Scored: lambda event, now: self._verdict(event.group, event.member, event.reward, now),
            Keep: self._on_keep,
            Reuse: self._on_reuse,
            Drop: self._on_drop,
            Train: self._on_batch,
            BatchTrained: self._on_trained,
            Published: self._on_published,
            EngineUp: self._on_engine_up,
            Retire: lambda told, now: self._engine(told.engine, "lost" if told.lost else "left", None, "", now),
            EngineDown: lambda event, now: self._engine(event.engine, "down", None, event.cause, now),
            EngineLoaded: lambda event, now: self._engine(event.engine, "loaded", event.version, "", now),
            RequestFailed: self._on_request_failed,
            Finish: self._on_finish,
        }
        self.kinds = frozenset(self._handlers)  # of entries that become rows

    def take(self, entries: Iterable[float | Entry]) -> str:
        """Entries of the kinds that become rows, in order, a time before those of each step.

        A step with something that no column can hold is left out, and with it whatever is said of its groups after it: what
        the file has of them is how they stood before. Returns what the first such step had, empty when there was none.
        """
        problem, now = "", 0.0
        step: list[Entry] = []
        for entry in chain(entries, (now,)):
            if not isinstance(entry, float):
                step.append(entry)
                continue
            if step:
                problem = self._step(step, now) or problem
                step = []
            now = entry
        return problem

    def _step(self, step: list[Entry], now: float) -> str:
        """All of it, or nothing and what is wrong with it."""
        if self._lost:
            step = [entry for entry in step if self._lost.isdisjoint(_groups(entry))]
        before, handlers = [len(rows) for rows in self.tables.values()], self._handlers
        entry: Entry | None = None
        try:
            for entry in step:
                handlers[type(entry)](entry, now)
        except (struct.error, OverflowError) as error:
            for rows, count in zip(self.tables.values(), before, strict=True):
                del rows[count:]
            self._later.clear()
            self._lost.update(group for each in step for group in _groups(each))
            where = ", ".join(str(group) for group in _groups(entry)[:1])
            return f"{type(entry).__name__}{f' of prompt {where}' if where else ''}: {error}"
        for each in self._later:
            each()
        self._later.clear()
        return ""

    def clear(self) -> None:
        """All rows are in the file; what becomes of `unfinished` members is told there."""
        for rows in self.tables.values():
            rows.clear()

    def _on_judged(self, told: Judged, now: float) -> None:
        row = (self._incarnation, *told.version, told.mean_reward, told.samples, told.unscored, now)
        self.tables["evaluations"].append(row)

    def _on_saved(self, told: Saved, now: float) -> None:
        row = (self._incarnation, *told.version, told.folder, told.prompt_cursor, pack_json(told.counters), now)
        self.tables["checkpoints"].append(row)

    def _on_admit(self, admit: Admit, now: float) -> None:
        prompt = admit.prompt
        life, group, row, ids = self._incarnation, prompt.id, prompt.row, pack_ids(prompt.token_ids)
        text, columns, messages = clean(prompt.text), pack_json(prompt.columns), pack_list(prompt.messages)
        check = checksum(ids, b"", f"{life} {group} {row} {columns} {messages} {text}")
        self.tables["prompts"].append((life, group, row, text, ids, columns, messages, now, check))

    def _on_wrote(self, told: Wrote, now: float) -> None:
        self._wrote(told.segment.request[:2], told.segment)

    def _wrote(self, key: Key, piece: Segment | Partial) -> None:
        pack_ids(piece.token_ids), pack_floats(piece.logprobs)  # those that they are joined with are to be written, too
        self._later.append(lambda: self.unfinished.wrote(key, piece))

    def _goes_on(self, key: Key, tokens: int) -> None:
        self._later.append(lambda: self.unfinished.goes_on(key, tokens))

    def _gone(self, key: Key) -> None:
        self._later.append(lambda: self.unfinished.gone(key))

    def _on_generate(self, told: Generate, now: float) -> None:
        request = told.request
        if request.id.attempt:  # the first one gives nothing up
            self._goes_on(request.id[:2], len(request.written_ids))

    def _completion(self, done: Completion, now: float) -> None:
        life, group, member = self._incarnation, done.group, done.member
        self._gone((group, member))
        ids, logprobs, spans = pack_ids(done.token_ids), pack_floats(done.logprobs), pack_spans(done.spans)
        turns, text, finish = pack_turns(done.turns, done.token_ids), clean(done.text), done.finish.value
        oldest = min([span.version.step for span in done.spans], default=None)
        if oldest is not None:
            pack_number(oldest)
        check = checksum(ids, logprobs, f"{life} {group} {member} {spans} {turns} {finish} {text}")
        count = len(done.token_ids)
        row = (life, group, member, finish, count, ids, logprobs, spans, turns, oldest, text, now, check)
        self.tables["completions"].append(row)

    def _verdict(self, group: int, member: int, reward: Reward, now: float) -> None:
        value, problem = None if reward.value is None else as_float(reward.value), reward.problem
        if value is not None and not math.isfinite(value):
            value, problem = None, problem or f"the reward is {value}"
        life, parts, problem = self._incarnation, pack_parts(reward.parts), clean(problem)
        check = checksum(b"", b"", f"{life} {group} {member} {value} {parts} {problem}")
        self.tables["verdicts"].append((life, group, member, value, parts, problem, now, check))

    def _on_keep(self, keep: Keep, now: float) -> None:
        """Only what comes from an earlier life is news."""
        for rollout in keep.group.rollouts if keep.recovered else ():
            self._completion(rollout.completion, now)
            self._verdict(keep.group.id, rollout.completion.member, rollout.reward, now)

    def _on_reuse(self, told: Reuse, now: float) -> None:
        """Completions without a verdict are told again in the same step, as they go to be judged."""
        begun = told.begun
        for rollout in begun.rollouts:
            self._completion(rollout.completion, now)
            self._verdict(begun.group, rollout.completion.member, rollout.reward, now)
        for partial in begun.partials:
            self._wrote((begun.group, partial.member), partial)

    def _on_drop(self, drop: Drop, now: float) -> None:
        if drop.member is not None and drop.reason is not DropReason.STOPPED:
            self._gone((drop.group, drop.member))
        row = (self._incarnation, drop.group, drop.member, drop.reason.value, clean(drop.cause), now)
        self.tables["drops"].append(row)

    def _on_batch(self, train: Train, now: float) -> None:
        self.tables["batches"].append((self._incarnation, train.step, now))
        groups = ((self._incarnation, train.step, position, group.id) for position, group in enumerate(train.groups))
        self.tables["batch_groups"].extend(groups)

    def _on_trained(self, event: BatchTrained, now: float) -> None:
        self.tables["batches_trained"].append((now, self._incarnation, event.version.step - 1))

    def _on_published(self, event: Published, now: float) -> None:
        self.tables["versions"].append((self._incarnation, *event.version, now))

    def _on_engine_up(self, event: EngineUp, now: float) -> None:
        self._engine(event.engine, "up", event.version, f"{event.slots} slots", now)

    def _on_request_failed(self, event: RequestFailed, now: float) -> None:
        group, member, attempt = event.request
        text = f"group {group}, member {member}, attempt {attempt}: {event.cause}"
        self._engine(event.engine, "request failed", None, text, now)

    def _engine(self, engine: str, event: str, version: WeightVersion | None, text: str, now: float) -> None:
        for number in version or ():
            pack_number(number)
        row = (self._incarnation, engine, event, *(version or (None, None)), clean(text), now)
        self.tables["engine_events"].append(row)

    def _on_finish(self, finish: Finish, now: float) -> None:
        self.tables["endings"].append((now, clean(finish.cause), int(finish.failed), self._incarnation))


def _groups(entry: Entry | None) -> tuple[int, ...]:
    """The prompts that it says something of."""
    match entry:
        case Admit():
            return (entry.prompt.id,)
        case Wrote():
            return (entry.segment.request.group,)
        case Generate():
            return (entry.request.id.group,)
        case Score():
            return (entry.completion.group,)
        case Keep():
            return (entry.group.id,)
        case Reuse():
            return (entry.begun.group,)
        case Unwrite() | Scored() | Drop():
            return (entry.group,)
        case Train():
            return tuple(group.id for group in entry.groups)
        case _:
            return ()
