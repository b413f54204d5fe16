"""What a run that was killed, or stopped, left in its journal for its next life.

A life that uses something again records it again in the step that admits the prompt, and no step is ever written half. So
for every prompt the newest life that admitted it says how it stands, and a batch is that of the newest life that took one for
its step. The next life begins at the newest checkpoint that is whole. From there on:

- a batch that was taken is taken again as it was, whatever became of the weights that were trained on it;
- a prompt that was dropped for good, or that the checkpoint's weights were trained on, is not asked again;
- of every other prompt the complete group is used again, or what there is of it, but nothing that was not believed. A member
  that was dropped from a group that was not complete is tried again from its beginning, and so is what was dropped only because
  the run was stopped.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Final

from rollyard.errors import JournalError
from rollyard.journal.decode import (
    COMPLETION,
    PARTIAL,
    PROMPT,
    VERDICT,
    Damaged,
    completion_of,
    piece_of,
    prompt_of,
    reward_of,
)
from rollyard.journal.partials import joined
from rollyard.journal.reader import JournalReader
from rollyard.journal.schema import OWN
from rollyard.lives import GroupsRecovered
from rollyard.types import Begun, Completion, DropReason, Group, Partial, Rollout, WeightVersion


@dataclass(frozen=True, slots=True)
class Past:
    """Where the next life of a run begins, and what it takes over.

    `done` are the ids of prompts that are not asked again: trained before `version`, dropped for good, or in one of
    `recovered.batches`. `unnamed` are checkpoints that the journal has lost: they are not gone on from, and not deleted.
    """

    version: WeightVersion  # step 0 without a checkpoint
    checkpoint: str  # folder, relative to the run's; "" for the beginning
    done: frozenset[int]
    recovered: GroupsRecovered
    counters: Mapping[str, Any]  # as they were given with the checkpoint; none without one
    lives: int  # so far
    unnamed: tuple[Path, ...] = ()


def read_past(path: Path, whole: Callable[[str], bool]) -> Past:
    """Read the journal of a run that is not going on.

    Args:
        path: of the journal.
        whole: is what lies in this folder of a checkpoint, relative to the run's, as it was written?

    Raises:
        JournalError: the file cannot be read.
    """
    with JournalReader(path) as reader:
        return _Past(path, reader).read(whole)


class _Past:
    """Reads one journal. Groups are None where nothing of them can be used."""

    def __init__(self, path: Path, reader: JournalReader) -> None:
        self._path, self._query = path, reader.query
        self._lives = {life.incarnation: life for life in reader.incarnations()}
        self._life: dict[int, int] = dict(self._query(OWN))
        self._batches: dict[int, dict[int, list[int]]] = {}  # groups by step and life
        for life, step, group in self._query("SELECT incarnation, step, group_id FROM batch_groups ORDER BY 1, 2, position"):
            self._batches.setdefault(step, {}).setdefault(life, []).append(group)

    def read(self, whole: Callable[[str], bool]) -> Past:
        version, folder, counters = self._checkpoint(whole)
        done = {*self._trained(version), *self._dropped()}
        batches = tuple(self._taken_again(version.step, done))
        done.update(group.id for batch in batches for group in batch)
        found = [self._found(id_) for id_ in sorted(self._life.keys() - done)]
        groups = tuple(each for each in found if isinstance(each, Group))
        begun = tuple(each for each in found if isinstance(each, Begun))
        recovered = GroupsRecovered(groups, batches, begun, self._filtered(version.step + len(batches) - 1))
        return Past(version, folder, frozenset(done), recovered, counters, len(self._lives))

    def _filtered(self, last: int) -> int:
        """Groups that were filtered since the batch of this step was first taken: later in its life, or in a later one."""
        ((found,),) = self._query(FILTERED, DropReason.FILTERED, last)
        return int(found)

    def _checkpoint(self, whole: Callable[[str], bool]) -> tuple[WeightVersion, str, dict[str, Any]]:
        """The newest that is whole: the one that was committed last."""
        sql = "SELECT version_step, version_incarnation, folder, counters FROM checkpoints ORDER BY rowid DESC"
        for step, life, folder, counters in self._query(sql):
            if whole(folder):
                try:
                    return WeightVersion(step, life), folder, _counters(counters)
                except Damaged as error:
                    warnings.warn(f"{self._path}: {folder}: {error}; an older one is used", RuntimeWarning, stacklevel=2)
        return WeightVersion(0), "", {}

    def _trained(self, version: WeightVersion) -> Iterator[int]:
        """Prompts that the weights of a version were trained on: by the life that made it, and by those that it came from."""
        life = version.incarnation
        for step in reversed(range(version.step)):
            while (begun := self._begun(life)).step > step and begun.incarnation < life:
                life = begun.incarnation
            taken = self._batches.get(step)
            if taken is None:
                raise JournalError(f"{self._path}: a checkpoint has version {version.step}, and there is no batch of step {step}")
            yield from taken[life if life in taken else max(taken)]

    def _begun(self, life: int) -> WeightVersion:
        """Where a life began."""
        found = self._lives.get(life)
        return WeightVersion(0) if found is None or found.begun is None else found.begun

    def _dropped(self) -> Iterator[int]:
        """Prompts that left for good."""
        sql = "SELECT group_id, incarnation FROM drops WHERE member IS NULL AND reason != ?"
        return (group for group, life in self._query(sql, DropReason.STOPPED) if self._life[group] == life)

    def _taken_again(self, step: int, done: Set[int]) -> Iterator[tuple[Group, ...]]:
        """Batches from this step on, as long as they follow each other and every group of them is as it was."""
        used = set(done)
        while (taken := self._batches.get(step)) is not None:
            ids = taken[max(taken)]
            found = [self._found(id_) for id_ in ids if id_ not in used]
            batch = tuple(group for group in found if isinstance(group, Group))
            if len(batch) < len(ids):
                return
            used.update(ids)
            yield batch
            step += 1

    def _found(self, id_: int) -> Group | Begun | None:
        """A prompt's group, when it is complete; else what there is of it."""
        life = self._life[id_]
        drops: dict[int, str] = dict(self._query(DROPS, life, id_, DropReason.STOPPED))
        judged: dict[int, Rollout] = {}
        unjudged: dict[int, Completion] = {}
        for row in self._query(MEMBERS, life, id_):
            try:
                done = completion_of(*row[:10])
                if drops.get(done.member) == DropReason.DISTRUSTED:
                    continue
                if row[10] is None:
                    unjudged[done.member] = done
                else:
                    judged[done.member] = Rollout(done, reward_of(*row[10:]))
            except Damaged as error:
                self._tell(error)
        if drops.keys() | judged.keys() >= set(range(self._lives[life].group_size)) and judged:
            (row,) = self._query(f"SELECT {PROMPT} FROM prompts p WHERE incarnation = ? AND group_id = ?", life, id_)
            try:
                return Group(prompt_of(*row), tuple(judged.values()))
            except Damaged as error:
                self._tell(error)
        rollouts = tuple(each for each in judged.values() if each.completion.member not in drops)
        completions = tuple(done for done in unjudged.values() if done.member not in drops)
        partials = tuple(part for part in self._partials(life, id_) if part.member not in drops)
        return Begun(id_, rollouts, completions, partials) if rollouts or completions or partials else None

    def _partials(self, life: int, group: int) -> Iterator[Partial]:
        for member, rows in groupby(self._query(PARTIALS, life, group), key=itemgetter(2)):
            try:
                ids, logprobs, spans = joined([piece_of(*row) for row in rows])
            except Damaged as error:
                self._tell(error)
            else:
                yield Partial(member, tuple(ids), tuple(logprobs), tuple(spans))

    def _tell(self, error: Damaged) -> None:
        """What the disk has changed is left out."""
        warnings.warn(f"{self._path}: {error}; it is written anew", RuntimeWarning, stacklevel=2)


def _counters(text: str) -> dict[str, Any]:
    """Raises Damaged."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"its counters are damaged: {error}") from error
    if not isinstance(found, dict):
        raise Damaged("its counters are none")
    return found


MEMBERS: Final = f"""
    SELECT {COMPLETION}, {VERDICT}
    FROM completions c LEFT JOIN verdicts v USING (incarnation, group_id, member)
    WHERE c.incarnation = ? AND c.group_id = ? ORDER BY c.member"""
DROPS: Final = """
    SELECT member, reason FROM drops
    WHERE incarnation = ? AND group_id = ? AND member IS NOT NULL AND reason != ?"""
FILTERED: Final = """
    SELECT count(*) FROM drops WHERE member IS NULL AND reason = ?1 AND (incarnation, dropped_at) >= (
        SELECT coalesce(min(incarnation), 0), coalesce(min(taken_at), 0) FROM batches
        WHERE step = ?2 AND incarnation = (SELECT min(incarnation) FROM batches WHERE step = ?2))"""
PARTIALS: Final = f"""
    SELECT {PARTIAL} FROM partials
    WHERE incarnation = ? AND group_id = ? ORDER BY member, position"""
