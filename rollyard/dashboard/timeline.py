"""A stretch of the timeline, as fine as a screen can show it: a day takes no longer than a minute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from rollyard.dashboard.told import LaneSpans, Timeline
from rollyard.types import Interval
from rollyard.watch.devices import ACTIVITIES, Lane
from rollyard.watch.lanes import pieces
from rollyard.watch.trace import Traced, few

LANES: Final = 128  # at most; beyond, one stands for several of its kind
SPANS: Final = 60_000  # of all lanes: about 3 MB
COARSEST: Final = 16  # columns of a lane at least

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Drawn:
    """One device, with what it takes to draw any stretch of its time quickly."""

    lane: Lane
    start_ns: int
    end_ns: int

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
    def _spent(self) -> tuple[NDArray[np.int64], list[tuple[Numbers, Numbers]]]:
        """Activities, and for each how much time it has taken up to some moments, between which it grows evenly."""
        found = pieces(self.lane.intervals, self.start_ns, self.end_ns)
        grown: list[tuple[Numbers, Numbers]] = []
        kinds = [index for index, activity in enumerate(ACTIVITIES) if any(piece.activity is activity for piece in found)]
        for index in kinds:
            own = [(piece.start_ns, piece.end_ns) for piece in found if piece.activity is ACTIVITIES[index]]
            moments = np.array(own, dtype=np.float64)
            taken = np.zeros_like(moments)
            taken[:, 1] = np.cumsum(moments[:, 1] - moments[:, 0])
            taken[1:, 0] = taken[:-1, 1]
            grown.append((moments.reshape(-1), taken.reshape(-1)))
        return np.array(kinds, dtype=np.int64), grown

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
        place = {activity: -index for index, activity in enumerate(ACTIVITIES)}
        ordered = sorted(inside, key=lambda each: (place[each.activity], each.start_ns))
        return [(max(begin, start_ns), min(end, end_ns), str(kind), what) for kind, begin, end, what in ordered]

    def _shares(self, start_ns: int, end_ns: int, columns: int) -> list[tuple[int, int, str, str]]:
        """In each column what took most of it; waiting is one of them."""
        kinds, grown = self._spent
        edges = np.linspace(start_ns, end_ns, columns + 1)
        shares = np.stack([np.diff(np.interp(edges, moments, taken)) for moments, taken in grown])
        waits = np.diff(edges) - shares.sum(axis=0)
        most = np.where(shares.max(axis=0) >= waits, kinds[shares.argmax(axis=0)], -1)
        turns = np.flatnonzero(np.diff(most)) + 1
        begins, ends = np.concatenate(([0], turns)), np.concatenate((turns, [columns]))
        return [
            (int(edges[begin]), int(edges[end]), str(ACTIVITIES[int(most[begin])]), "")
            for begin, end in zip(begins, ends, strict=True)
            if most[begin] >= 0
        ]


class Whole:
    """A run's timeline, from 0 to its end."""

    def __init__(self, traced: Traced) -> None:
        traced = few(traced, LANES)
        start, end = traced.start_ns, traced.end_ns
        self._start, self.end_ns = start, end - start
        self._lanes = [Drawn(lane, start, end) for lane in traced.lanes]
        self._marks = [(mark.step, mark.at_ns - start) for mark in traced.marks]

    def within(self, start_ns: int, end_ns: int, width: int) -> Timeline:
        """A stretch of it, in at most `width` columns."""
        start_ns, end_ns = min(start_ns, self.end_ns), min(end_ns, self.end_ns)
        if end_ns <= start_ns:
            return Timeline(start_ns, end_ns, self.end_ns, ())
        columns = max(min(width, SPANS // max(len(self._lanes), 1) // 2), COARSEST)
        lanes = [lane.within(start_ns + self._start, end_ns + self._start, columns) for lane in self._lanes]
        marks = [mark for mark in self._marks if start_ns <= mark[1] <= end_ns]
        every = -(-len(marks) // width) if marks else 1
        return Timeline(start_ns, end_ns, self.end_ns, tuple(map(self._moved, lanes)), tuple(marks[::every]))

    def _moved(self, lane: LaneSpans) -> LaneSpans:
        if not self._start:
            return lane
        spans = tuple((begin - self._start, end - self._start, kind, what) for begin, end, kind, what in lane.spans)
        return LaneSpans(lane.name, lane.role, lane.devices, lane.exact, spans)
