"""What is said of the fitness of engines, and of what becomes of those that are not fit (PURE). The rest of the language between
core and world is in `events`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollyard.events import EngineId, Event, Instruction
from rollyard.types import Verdict


@dataclass(frozen=True, slots=True)
class EngineUnfit(Event):
    """An engine does not answer."""

    engine: EngineId
    cause: str


@dataclass(frozen=True, slots=True)
class WrongAnswer(Event):
    """An engine gave an answer that cannot be, outside the rollouts."""

    engine: EngineId
    cause: str


@dataclass(frozen=True, slots=True)
class EngineProbed(Event):
    """What an engine's logprobs say of the weights that it decodes with. Contradicted: other ones than it says, see `cause`."""

    engine: EngineId
    verdict: Verdict
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Probe(Instruction):
    """Compare an engine's logprobs with the trainer's, beside whatever it does."""

    engine: EngineId


@dataclass(frozen=True, slots=True)
class Condemn(Instruction):
    """The engine is of no more use: its process is ended at once, or its server let go of. That it is down is told as ever."""

    engine: EngineId
    cause: str


@dataclass(frozen=True, slots=True)
class Unwrite(Instruction):
    """Record that what a member wrote after its first `tokens` tokens is forgotten, and written anew. Episodes have none."""

    group: int
    member: int
    tokens: int
