"""A stretch of the timeline, as fine as a screen can show it: a day takes no longer than a minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from rollyard.dashboard.told import LaneSpans, Timeline
from rollyard.types import Interval
from rollyard.watch.devices import ACTIVITIES, PLACES, Lane
from rollyard.watch.trace import DRIVER, OF_DRIVER, Traced, few

LANES: Final = 128  # at most; beyond, one stands for several of its kind
SPANS: Final = 60_000  # of all lanes: about 3 MB
MANY: Final = 1000  # intervals of a lane, that are hardly ever shown each by itself
COARSEST: Final = 16  # columns of a lane at least

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Drawn:
    """One device, with what it takes to draw any stretch of its time quickly."""

    lane: Lane

    def prepare(self) -> None:
        """Compute what stretches need."""
        if len(self.ordered) > MANY:
            _ = self._covered
        _ = self._bounds

    @cached_property
    def ordered(self) -> list[Interval]:
        """By when they began."""
        return sorted(self.lane.intervals, key=lambda interval: interval.start_ns)

    @cached_property
    def _bounds(self) -> tuple[Numbers, Numbers]:
        """Of the ordered intervals: when each began, and the latest end of any up to it."""
        starts = np.array([interval.start_ns for interval in self.ordered], dtype=np.float64)
        ends = np.array([interval.end_ns for interval in self.ordered], dtype=np.float64)
        return starts, np.maximum.accumulate(ends) if len(ends) else ends

    @cached_property
    def _covered(self) -> tuple[NDArray[np.int64], list[tuple[Numbers, Numbers]]]:
        """Activities, the one that counts first before the others, and how long each or one before it had gone on at a moment."""
        kinds = np.array([PLACES[interval.activity] for interval in self.ordered], dtype=np.int64)
        bounds = np.array([interval[1:3] for interval in self.ordered], dtype=np.float64).reshape(-1, 2)
        there = np.unique(kinds)
        return there, [_coverage(bounds[kinds <= kind]) for kind in there]

    def within(self, start_ns: int, end_ns: int, columns: int) -> LaneSpans:
        """What it did in this stretch: as it was noted where that is not more than there is room for."""
        starts, latest = self._bounds
        first, last = int(np.searchsorted(latest, start_ns, "right")), int(np.searchsorted(starts, end_ns, "left"))
        inside = [each for each in self.ordered[first:last] if each.end_ns > start_ns] if last - first <= 2 * columns else []
        exact = last - first <= 2 * columns
        spans = self._exact(inside, start_ns, end_ns) if exact else self._shares(start_ns, end_ns, columns)
        lane = self.lane
        return LaneSpans(lane.device, "+".join(lane.roles), lane.devices, exact, tuple(spans))

    def _exact(self, inside: Sequence[Interval], start_ns: int, end_ns: int) -> list[tuple[int, int, str, str]]:
        """What counts first comes last."""
        ordered = sorted(inside, key=lambda each: (-PLACES[each.activity], each.start_ns))
        return [(max(begin, start_ns), min(end, end_ns), str(kind), what) for kind, begin, end, what in ordered]

    def _shares(self, start_ns: int, end_ns: int, columns: int) -> list[tuple[int, int, str, str]]:
        """In each column what took most of it; waiting is one of them."""
        kinds, covered = self._covered
        edges = np.linspace(start_ns, end_ns, columns + 1)
        reached = np.stack([np.diff(np.interp(edges, moments, taken)) for moments, taken in covered])
        shares = np.diff(reached, axis=0, prepend=0.0)
        most = np.where(shares.max(axis=0) >= np.diff(edges) - reached[-1], kinds[shares.argmax(axis=0)], -1)
        turns = np.flatnonzero(np.diff(most)) + 1
        begins, ends = np.concatenate(([0], turns)), np.concatenate((turns, [columns]))
        return [
            (int(edges[begin]), int(edges[end]), str(ACTIVITIES[int(most[begin])]), "")
            for begin, end in zip(begins, ends, strict=True)
            if most[begin] >= 0
        ]


def _coverage(bounds: Numbers) -> tuple[Numbers, Numbers]:
    """How long any of these went on, up to some moments between which that grows evenly. `[intervals, 2]`, by beginning."""
    ends = np.maximum.accumulate(bounds[:, 1])
    alone = np.flatnonzero(bounds[1:, 0] > ends[:-1]) + 1  # nothing goes on just before these
    begins = bounds[np.concatenate(([0], alone)), 0]
    stops = ends[np.concatenate((alone - 1, [len(ends) - 1]))]
    taken = np.cumsum(stops - begins)
    return np.stack((begins, stops), axis=1).reshape(-1), np.stack((taken - (stops - begins), taken), axis=1).reshape(-1)


class Whole:
    """A run's timeline, from 0 to its end."""

    def __init__(self, traced: Traced) -> None:
        traced = few(traced, LANES)
        start, end = traced.start_ns, traced.end_ns
        self._start, self.end_ns = start, end - start
        self._lanes = [Drawn(_own(lane)) for lane in traced.lanes]
        self._marks = [(mark.step, mark.at_ns - start) for mark in traced.marks]
        self._slots = [each._replace(start_ns=each.start_ns - start, end_ns=each.end_ns - start) for each in traced.slots]
        self._lives = [(life, at - start) for life, at in enumerate(traced.lives, 2)]

    def ready(self) -> Self:
        """What any stretch of it needs is there already."""
        for lane in self._lanes:
            lane.prepare()
        return self

    def within(self, start_ns: int, end_ns: int, width: int) -> Timeline:
        """A stretch of it, in at most `width` columns."""
        start_ns, end_ns = min(start_ns, self.end_ns), min(end_ns, self.end_ns)
        if end_ns <= start_ns:
            return Timeline(start_ns, end_ns, self.end_ns, ())
        columns = max(min(width, SPANS // max(len(self._lanes), 1) // 2), COARSEST)
        lanes = [lane.within(start_ns + self._start, end_ns + self._start, columns) for lane in self._lanes]
        marks = [mark for mark in self._marks if start_ns <= mark[1] <= end_ns]
        every = -(-len(marks) // width) if marks else 1
        slots = tuple(each for each in self._slots if each.start_ns < end_ns and each.end_ns > start_ns)
        lives = tuple(life for life in self._lives if start_ns <= life[1] < end_ns)
        return Timeline(start_ns, end_ns, self.end_ns, tuple(map(self._moved, lanes)), tuple(marks[::every]), slots, lives)

    def _moved(self, lane: LaneSpans) -> LaneSpans:
        if not self._start:
            return lane
        spans = tuple((begin - self._start, end - self._start, kind, what) for begin, end, kind, what in lane.spans)
        return LaneSpans(lane.name, lane.role, lane.devices, lane.exact, spans)


def _own(lane: Lane) -> Lane:
    """Of the driver what no device shows, else the rest would hide it."""
    if lane.roles != (DRIVER,):
        return lane
    return lane._replace(intervals=[each for each in lane.intervals if each.activity in OF_DRIVER])
