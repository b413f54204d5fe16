"""What one step of an engine takes, as a function of what it attends to (PURE)."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, floor, inf, sqrt
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
    _pieces: tuple[tuple[float, float, float], ...] = field(init=False, repr=False, compare=False)  # up to context, fixed, slope

    def __post_init__(self) -> None:
        object.__setattr__(self, "_pieces", tuple(_highest(self.floor_s, self.lines)))

    def at(self, context: float) -> float:
        """Seconds of the step that attends to so many tokens, over all its sequences."""
        return self.floor_s + max(line.fixed + line.per_token * context for line in self.lines)

    def total(self, context: int, grow: int, steps: int) -> float:
        """Seconds of `steps` steps, of which the first attends to `context` tokens and each later one to `grow` more."""
        seconds = 0.0
        for until, fixed, slope in self._pieces:
            if context >= until:
                continue
            here = steps if context + grow * (steps - 1) < until else ceil((until - context) / grow)
            seconds += here * (fixed + slope * (context + grow * (here - 1) / 2))
            steps -= here
            if not steps:
                break
            context += grow * here
        return seconds

    def fit(self, context: int, grow: int, seconds: float, most: int) -> int:
        """How many of `most` such steps end within so many seconds."""
        done = 0
        for until, fixed, slope in self._pieces:
            if context >= until:
                continue
            left = most - done
            here = left if context + grow * (left - 1) < until else ceil((until - context) / grow)
            first, growth = fixed + slope * context, slope * grow
            fits = _steps(first, growth, seconds, here)
            done += fits
            if fits < here or done == most:
                break
            seconds -= here * (first + growth * (here - 1) / 2)
            context += grow * here
        return done


def _highest(floor_s: float, lines: tuple[Line, ...]) -> list[tuple[float, float, float]]:
    """The lines that are the longest somewhere from context 0 on, in order, and up to where each is."""
    fixed, slope = max(lines, key=lambda line: (line.fixed, line.per_token))
    here = 0.0
    pieces: list[tuple[float, float, float]] = []
    while True:
        steeper = [line for line in lines if line.per_token > slope]
        crossings = [((fixed - line.fixed) / (line.per_token - slope), line.per_token, line) for line in steeper]
        if not crossings:
            return [*pieces, (inf, floor_s + fixed, slope)]
        until = min(crossing for crossing, _, _ in crossings)
        if until > here:
            pieces.append((until, floor_s + fixed, slope))
            here = until
        _, _, (fixed, slope) = max((each for each in crossings if each[0] <= here), key=lambda each: each[1])


def _steps(first: float, growth: float, seconds: float, most: int) -> int:
    """How many of `most` steps fit: the i-th takes first + growth * i."""

    def taken(steps: int) -> float:
        return steps * (first + growth * (steps - 1) / 2)

    if taken(most) <= seconds:
        return most
    half = first - growth / 2
    root = sqrt(half * half + 2 * growth * seconds)
    guess = 2 * seconds / (half + root) if half > 0 else (root - half) / growth
    steps = min(max(floor(guess), 0), most)
    while taken(steps) > seconds:
        steps -= 1
    while taken(steps + 1) <= seconds:
        steps += 1
    return steps
