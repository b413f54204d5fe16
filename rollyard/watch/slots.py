"""Slots busy and requests that wait, over the time of a run, in a bounded number of stretches (PURE)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Final, NamedTuple

from rollyard.stats import SlotsNow

MOST: Final = 1024  # stretches that are kept: beyond, neighbours become one, and later ones are twice as long
FINEST_NS: Final = 50_000_000  # that a stretch lasts at least
OFTEN: Final = 4  # looks in a stretch that are worth it


class Stretch(NamedTuple):
    """Means from `start_ns` to `end_ns`."""

    start_ns: int
    end_ns: int
    busy: float  # share of the slots of all engines that hold a request; 0 where there is no engine
    queue: float  # requests that no engine has


class SlotsLog:
    """Told how things stand, often or seldom; `due_ns` says from when on it gains by that.

    Args:
        most: stretches that are kept.
        finest_ns: that each of them lasts at least.
    """

    def __init__(self, most: int = MOST, finest_ns: int = FINEST_NS) -> None:
        self._most, self._width = most, finest_ns
        self._done: list[Stretch] = []
        self._open: Stretch | None = None
        self.due_ns = 0

    def note(self, now_ns: int, slots: SlotsNow) -> None:
        """So it has stood since the moment of the call before."""
        if self._open is None:
            self._open = Stretch(now_ns, now_ns, 0.0, 0.0)
            return
        busy = slots.running / slots.slots if slots.slots else 0.0
        self._open = _joined(self._open, Stretch(self._open.end_ns, now_ns, busy, float(slots.queue)))
        if self._open.end_ns - self._open.start_ns >= self._width:
            self._done.append(self._open)
            self._open = Stretch(now_ns, now_ns, 0.0, 0.0)
            if len(self._done) >= self._most:
                self._done, self._width = thinned(self._done, self._most // 2), 2 * self._width
        self.due_ns = now_ns + self._width // OFTEN

    def stretches(self) -> tuple[Stretch, ...]:
        """One follows the other without a gap, up to the last call."""
        last = self._open
        return (*self._done, *([last] if last is not None and last.end_ns > last.start_ns else []))


def thinned(stretches: Sequence[Stretch], most: int) -> list[Stretch]:
    """At most so many, neighbours made one."""
    found = list(stretches)
    while len(found) > max(most, 1):
        pairs = zip_longest(found[::2], found[1::2])
        found = [one if other is None else _joined(one, other) for one, other in pairs]
    return found


def _joined(one: Stretch, other: Stretch) -> Stretch:
    """Both as one, weighted by how long each lasted."""
    first, second = one.end_ns - one.start_ns, other.end_ns - other.start_ns
    whole = first + second or 1
    busy, queue = one.busy * first + other.busy * second, one.queue * first + other.queue * second
    return Stretch(one.start_ns, other.end_ns, busy / whole, queue / whole)
