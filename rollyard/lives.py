"""What one life of a run leaves to the next, as core and journal say it (PURE). The rest of their language is in `events`.

A run that was killed is resumed from its newest checkpoint: that is its next life.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollyard.events import Event, Instruction
from rollyard.types import Begun, Group, Segment


@dataclass(frozen=True, slots=True)
class GroupsRecovered(Event):
    """What an earlier life of the run left. Told once, before any prompt is offered, and before generation opens.

    Groups join when their prompts are offered again. What has a token too old for the place that it would have is written anew.
    `batches` were taken before, in order from the version that there is, and wait to be trained. `filtered` groups were dropped
    since the last batch was taken because all their verdicts were equal.
    """

    groups: tuple[Group, ...]  # complete
    batches: tuple[tuple[Group, ...], ...] = ()
    begun: tuple[Begun, ...] = ()
    filtered: int = 0


@dataclass(frozen=True, slots=True)
class Wrote(Instruction):
    """Record tokens that a member was given and goes on from, whatever becomes of the engine. Episodes have none."""

    segment: Segment


@dataclass(frozen=True, slots=True)
class Reuse(Instruction):
    """Record what of an incomplete group of an earlier life is used again."""

    begun: Begun
