"""What one step of an engine takes, as a function of what it attends to (PURE)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Line(NamedTuple):
    """Seconds that grow with the context: `fixed + per_token * context`."""

    fixed: float
    per_token: float


@dataclass(frozen=True, slots=True)
class StepCost:
    """A decode step of a certain number of sequences: `floor_s` and the longest of the lines.

    A roofline is two of them: memory and arithmetic. Between two changes of who runs, the context grows by the same number of
    tokens at each step, so that the time of many steps has a closed form.
    """

    floor_s: float
    lines: tuple[Line, ...]

    def at(self, context: float) -> float:
        """Seconds of the step that attends to so many tokens, over all its sequences."""
        return self.floor_s + max(line.fixed + line.per_token * context for line in self.lines)
