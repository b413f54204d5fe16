"""How long a run still takes: what its steps took, of late, and before there was one what was to be expected."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from rollyard.watch.timeline import PhaseSeconds

RECENT: Final = 16  # steps that tell what the next ones take: lengths of completions change as a policy learns
ENOUGH: Final = 0.1  # share of the first batch from which on it tells how long a step is


class Left(NamedTuple):
    """At one moment: seconds of a step, those since the last one, and those after the last of all. `rough`: no step is done."""

    step_s: float | None
    since_s: float = 0.0
    end_s: float = 0.0
    rough: bool = False

    def seconds(self, steps: int) -> float | None:
        """Seconds until so many more steps are done, and what comes after them; None: nobody knows."""
        if self.step_s is None:
            return None
        if steps <= 0:
            return max(self.end_s - self.since_s, 0.0)
        return max(self.step_s - self.since_s, 0.0) + (steps - 1) * self.step_s + self.end_s


class Eta:
    """Learns from each step.

    Args:
        forecast_s: seconds of a step, as a simulation expects them; 0: there was none.
    """

    def __init__(self, forecast_s: float = 0.0) -> None:
        self._forecast_s = forecast_s
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._first: float | None = None  # of this life: it also starts engines, and proves that weights reach them
        self._rough: float | None = None  # what the first batch tells
        self._eval_s, self._evaluations = 0.0, 0

    def go_on(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Metrics of the steps of earlier lives."""
        for row in rows:
            parts = [seconds for name, seconds in row.items() if name.startswith("phase/") and name[6:] in PARTS]
            if parts and all(isinstance(seconds, int | float) for seconds in parts):
                self._steps.append(sum(parts))

    def add(self, seconds: PhaseSeconds) -> None:
        """A step is done."""
        if self._first is None:
            self._first = seconds.wall_s - seconds.eval_s
        else:
            self._steps.append(seconds.wall_s)

    def evaluated(self, so_far_s: float) -> None:
        """One more evaluation is done. All of this life took so long."""
        self._eval_s, self._evaluations = so_far_s, self._evaluations + 1

    def at(self, since: PhaseSeconds, judged: float) -> Left:
        """Now.

        Args:
            since: the last step, or the beginning.
            judged: share of the batch that is being gathered.
        """
        end_s = self._eval_s / self._evaluations if self._evaluations else 0.0
        since_s = since.wall_s if self._first is not None else since.wall_s - since.eval_s - since.setup_s
        if self._steps:
            return Left(sum(self._steps) / len(self._steps), since_s, end_s)
        if self._first is not None:
            return Left(self._first, since_s, end_s)
        if self._forecast_s:
            return Left(self._forecast_s, since_s, end_s, rough=True)
        if judged >= ENOUGH:
            self._rough = since_s / judged
        if self._rough is not None:  # while the first batch is trained on, too
            return Left(max(self._rough, since_s), since_s, end_s, rough=True)
        return Left(None)


PARTS: Final = frozenset(f"{name}_s" for name in PhaseSeconds().parts())
