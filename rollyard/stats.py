"""What engines count, and what their steps took by how many sequences ran (PURE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Pace:
    """Totals of the steps for rollouts in which about as many sequences decoded: over half of `running`, at most that many.

    What the process did between two steps is in their seconds.
    """

    running: int  # a power of two; 0: only prompts were read
    prefill: bool  # tokens of prompts, or of what was cut, were computed beside
    steps: int
    sequences: int  # that decoded; a first token, which comes from the prompt, costs no more than that
    prefilled: int  # tokens
    context: int  # tokens that were attended to, of the sequences that were running before
    seconds: float
    thread_s: float = 0.0  # processor time of the thread that computed; 0 where nobody measures it
    process_s: float = 0.0  # that of the whole process, where it is the engine's own; else 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Running totals of one engine since it started."""

    steps: int = 0
    generated_tokens: int = 0
    prefilled_tokens: int = 0  # prompt tokens computed, shared ones once
    shared_tokens: int = 0  # prompt tokens taken from shared pages instead
    recomputed_tokens: int = 0  # computed again after a preemption or a cut
    preemptions: int = 0
    near_ties: int = 0  # draws so close to a boundary that float rounding could flip them
    step_s: float = 0.0  # seconds inside engine steps
    prefill_s: float = 0.0  # of those, the share of the tokens that were prefilled or recomputed; 0 where nobody says
    prefill_steps: int = 0  # steps that had such tokens; 0 where nobody says
    plan_s: float = 0.0  # of those, seconds outside the forward pass and the draw: scheduling, and collecting segments
    linear_s: float = 0.0  # of those, seconds of linear layers, where the engine measures them
    copied_bytes: int = 0  # of weights, at all loads, into the engine's own layout or number format
    decoder: str = ""  # how the embedded engine computes: native, or plain and why
    busy_slot_s: float = 0.0  # sum over steps of (sequences that got a token) x seconds
    slots: int = 0
    paces: tuple[Pace, ...] = ()  # seconds by sequences running; empty where nobody says

    @property
    def slots_busy(self) -> float:
        """Mean share of decode slots doing work while the engine was stepping."""
        whole = self.step_s * self.slots
        return self.busy_slot_s / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class EngineNow:
    """What one engine holds at one moment."""

    name: str
    slots: int
    running: int  # requests
    version: int | None  # step of its weights; None: it acknowledged none yet
    held: bool  # it gets no request just now: it sleeps, or its weights are about to change


class SlotsNow(NamedTuple):
    """How full all engines are at one moment."""

    running: int  # requests that they hold
    slots: int  # that they have
    queue: int  # requests that none of them has
