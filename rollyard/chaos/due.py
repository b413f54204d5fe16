"""When each fault is due (PURE)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random

from rollyard.chaos.faults import Fault
from rollyard.events import BatchTrained, Event, Instruction


class Due:
    """Says which faults are due, by their number.

    Args:
        faults: in their order.
        done: how often each was carried out in earlier lives of the run.
        begun: seconds, when this life began.
    """

    def __init__(self, faults: Sequence[Fault], done: Mapping[int, int], begun: float) -> None:
        self._faults = faults
        self._left = [fault.times - done.get(number, 0) for number, fault in enumerate(faults)]
        self._heard = [0] * len(faults)
        self._random = [Random(f"{fault.seed} {number} {done.get(number, 0)}") for number, fault in enumerate(faults)]
        self._at = [self._next(number, begun) for number in range(len(faults))]
        self._names = {fault.event for fault in faults if fault.event}
        self._steps = any(fault.step is not None for fault in faults)

    @property
    def next(self) -> float:
        """When the clock alone makes the next one due; infinite when none."""
        return min((at for number, at in enumerate(self._at) if self._left[number] > 0), default=math.inf)

    def heard(self, entry: Event | Instruction) -> list[int]:
        """The run's core heard or said something."""
        name, found = type(entry).__name__, []
        if name in self._names:
            for number, fault in enumerate(self._faults):
                if fault.event == name:
                    self._heard[number] += 1
                    if self._heard[number] % fault.count == 0:
                        found += self._took(number)
        if self._steps and isinstance(entry, BatchTrained):
            for number, fault in enumerate(self._faults):
                if fault.step == entry.version.step:
                    found += self._took(number)
        return found

    def passed(self, now: float) -> list[int]:
        """Time passed."""
        found = []
        for number, at in enumerate(self._at):
            if at <= now:
                self._at[number] = self._next(number, now)
                found += self._took(number)
        return found

    def _took(self, number: int) -> list[int]:
        if self._left[number] <= 0:
            return []
        self._left[number] -= 1
        return [number]

    def _next(self, number: int, now: float) -> float:
        fault = self._faults[number]
        if fault.after_s is not None:
            return now + fault.after_s
        if fault.per_minute is not None:
            return now + self._random[number].expovariate(fault.per_minute / 60)
        return math.inf
