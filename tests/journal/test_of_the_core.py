"""What the core says over several lives, in a journal: read back it is what the rules of recovery make of it in memory."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard import events as ev
from rollyard.journal.journal import Journal
from rollyard.journal.recover import read_past
from rollyard.types import WeightVersion
from tests import records
from tests.journal.records import RUN
from tests.test_lives import Life, check_the_end


class Both(records.Records):
    """Records in memory, and the same in a journal, of which a life leaves all."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        super().__init__(RUN.group_size)
        self._path, self._dice = path, dice

    def step(self, message: object, said: Iterable[object]) -> None:
        super().step(message, said)
        self._journal.record_step((message, *said))  # type: ignore[arg-type]
        if not self._dice.randrange(20):
            self._journal.flush()

    def checkpoint(self, version: WeightVersion, counters: dict) -> None:
        super().checkpoint(version, counters)
        self._journal.commit_checkpoint(version, f"checkpoints/{version.step}", 0, counters).result(60)

    def kill(self, dice: random.Random) -> None:
        self.life += 1
        self._journal.flush()
        self._journal.abandon()

    def past(self) -> records.Past:
        expected = super().past()
        if self.life:
            found, left = read_past(self._path, lambda folder: True), expected.recovered
            begun = tuple(each for each in left.begun if each.rollouts or each.completions or each.partials)
            assert found.recovered == replace(left, begun=begun)
            assert (found.version, found.done, found.lives) == (expected.version, set(expected.done), self.life)
        self._journal = Journal(self._path, RUN)
        self._journal.record_beginning(expected.version)
        assert self._journal.incarnation == self.life
        return expected


@pytest.mark.parametrize("placement", ["colocated", "separate", "async", "swap"])
def test_a_journal_leaves_what_was_said(placement: str, tmp_path: Path) -> None:
    for seed in range(4):
        dice = random.Random(seed)
        both, limit = Both(tmp_path / f"{seed}.sqlite", dice), {"async": 2, "swap": 1}.get(placement, 0)
        rules = dict(steps=5, engines=2, batch=2, save=dice.choice((0, 2)), placement=placement, limit=limit)
        rules |= dict(rollover=dice.choice(list(ev.Rollover)), refills=dice.choice((0, 2)), turns=dice.choice((0, 0, 2)))
        for number, events in enumerate((dice.randrange(100), dice.randrange(60), 50_000)):
            life = Life(rules, 14, both, seed + number, broken=frozenset((3,)), flat=frozenset((4, 5, 8)))
            life.run(events)
            both.kill(dice)
        check_the_end(life, 5, 14)
