"""What a view needs to know: the whole of what joins the loop and the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard.watch.eta import Left
from rollyard.watch.timeline import PhaseSeconds

UNKNOWN = Left(None)


@dataclass(frozen=True, slots=True)
class Header:
    """What stays the same during a run, as a person would call it."""

    run: str
    model: str
    placement: str
    engine: str
    steps: int  # planned


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment. Cheap to make: `rewards` may be the caller's own growing list, it is only read."""

    step: int  # steps done, those of earlier lives too
    phases: PhaseSeconds  # since the start of the run
    rewards: Sequence[float | None]  # mean of each step so far
    activity: str = ""  # what is going on now, such as "generate" or "making the base policy"
    waiting: str = ""  # for another job, and since when; not another text at each moment
    judged: int = 0  # completions judged for the batch being gathered
    wanted: int = 0  # of this many; 0 when no batch is being gathered
    eval_first: float | None = None
    eval_last: float | None = None
    evaluations: int = 0  # so far, those of earlier lives among them
    tokens: int = 0  # sampled for rollouts since the start of the run
    slots_busy: float | None = None  # mean share of decode slots doing work; None before the first engine step
    dropped: int = 0  # prompts dropped since the start of the run
    before: int = 0  # steps that earlier lives of the run did
    left: Left = UNKNOWN

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of generation."""
        return self.tokens / self.phases.generating_s if self.phases.generating_s else 0.0

    def eta_s(self, steps: int) -> float | None:
        """Seconds until the run of `steps` is over, what comes after the last one included. None: nothing tells yet."""
        return self.left.seconds(steps - self.step)
