"""What the core and environments say to each other: the events and instructions of episodes.

    Play ─► Asked ─► Generate ... (Stream ...) ─► Tell ─► Asked ─► ... ─► EpisodeEnded ─► Score

An episode is given up when its member is dropped (`events.Drop`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard.events import Event, Instruction
from rollyard.types import Asking, Prompt, Reply, Reward


@dataclass(frozen=True, slots=True)
class Asked(Event):
    """An environment asks for a turn of a member's episode, one at a time."""

    group: int
    member: int
    asking: Asking


@dataclass(frozen=True, slots=True)
class EpisodeEnded(Event):
    """A member's episode is over. `verdict`: the environment's own; None: the configured rewards judge."""

    group: int
    member: int
    verdict: Reward | None
    text: str  # of all that came after the prompt, the environment's part too


@dataclass(frozen=True, slots=True)
class Play(Instruction):
    """Begin a member's episode. It goes on until it ends, or its member is dropped."""

    prompt: Prompt
    member: int


@dataclass(frozen=True, slots=True)
class Stream(Instruction):
    """Tell an environment that wants to hear it what the policy is writing.

    Where `after` is less than it has heard of, the rest of that was taken back, and these tokens are there instead.
    """

    group: int
    member: int
    after: int  # tokens of this turn before them
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Tell(Instruction):
    """Tell an environment what the policy wrote."""

    group: int
    member: int
    reply: Reply
