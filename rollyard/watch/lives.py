"""What the lives of a run came to, for its report: how many, what was done again, what was used again (PURE)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from rollyard.events import Event, Instruction, Keep
from rollyard.lives import GroupsRecovered, Reuse
from rollyard.types import Begun, Completion, Partial

Written = Completion | Partial

SEEN: Final = (GroupsRecovered, Keep, Reuse)  # what `Lives.saw` counts


@dataclass(frozen=True, slots=True)
class Lives:
    """A run that was killed, or stopped, is resumed from its newest checkpoint: that is its next life.

    `begun` has the version that each life began with, and `repeated` are steps that were taken again, over all lives: those that
    an earlier one had taken after that version. What this life took over: `groups` that were complete, as many `members` and
    `tokens`, those of incomplete groups included. `lost` tokens of the earlier lives were not used again, being too old by now,
    or of a group that had to be begun anew. What the earlier lives had not written down yet is in no count.
    """

    count: int = 1
    begun: tuple[int, ...] = (0,)
    repeated: int = 0
    groups: int = 0
    members: int = 0
    tokens: int = 0
    lost: int = 0

    def saw(self, entry: Event | Instruction) -> Lives:
        """With what the core was told, or said, of the earlier ones."""
        if isinstance(entry, GroupsRecovered):
            groups = (*entry.groups, *(group for batch in entry.batches for group in batch))
            told: list[Written] = [rollout.completion for group in groups for rollout in group.rollouts]
            told += (each for begun in entry.begun for each in _of(begun))
            return replace(self, lost=self.lost + _tokens(told))
        if isinstance(entry, Keep) and entry.recovered:
            used: list[Written] = [rollout.completion for rollout in entry.group.rollouts]
            return replace(self._used(used), groups=self.groups + 1)
        return self._used(_of(entry.begun)) if isinstance(entry, Reuse) else self

    def _used(self, written: list[Written]) -> Lives:
        tokens = _tokens(written)
        return replace(self, members=self.members + len(written), tokens=self.tokens + tokens, lost=self.lost - tokens)


def _of(begun: Begun) -> list[Written]:
    return [*(rollout.completion for rollout in begun.rollouts), *begun.completions, *begun.partials]


def _tokens(written: list[Written]) -> int:
    return sum(len(each.token_ids) for each in written)
