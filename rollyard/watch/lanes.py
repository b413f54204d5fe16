"""What a device does at each moment, and what share of many does what: the numbers of a timeline picture (PURE)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from rollyard.types import Activity, Interval
from rollyard.watch.devices import ACTIVITIES, Lane


class Piece(NamedTuple):
    """A stretch in which a device does one thing."""

    activity: Activity
    start_ns: int
    end_ns: int


def pieces(intervals: Sequence[Interval], start_ns: int, end_ns: int) -> list[Piece]:
    """What a device does, moment by moment: where two intervals overlap, what comes first in Activity. Gaps are waits."""
    ordered = sorted(intervals, key=lambda interval: interval.start_ns)
    found = list[Piece]()
    if all(before.end_ns <= after.start_ns for before, after in pairwise(ordered)):
        for activity, begin, end, _ in ordered:
            if max(begin, start_ns) < min(end, end_ns):
                _append(found, Piece(activity, max(begin, start_ns), min(end, end_ns)))
        return found
    place = {activity: index for index, activity in enumerate(ACTIVITIES)}
    edges: list[tuple[int, int, int]] = []
    for activity, begin, end, _ in ordered:
        begin, end = max(begin, start_ns), min(end, end_ns)
        if begin < end:
            edges += ((begin, 1, place[activity]), (end, -1, place[activity]))
    edges.sort()
    open_, at = [0] * len(ACTIVITIES), start_ns
    doing: Activity | None = None
    for time, change, index in edges:
        if time > at:
            if doing is not None:
                _append(found, Piece(doing, at, time))
            at = time
        open_[index] += change
        doing = next((activity for activity, count in zip(ACTIVITIES, open_, strict=True) if count), None)
    return found


def _append(found: list[Piece], piece: Piece) -> None:
    if found and found[-1].activity is piece.activity and found[-1].end_ns == piece.start_ns:
        found[-1] = found[-1]._replace(end_ns=piece.end_ns)
    else:
        found.append(piece)


def fewer(intervals: Sequence[Interval], most: int) -> Sequence[Interval]:
    """What a device does, in at most so many intervals (at least one an activity), and without their parts.

    Its time is cut into stretches, as short as can be. In each of them it does everything as long as before, one after the other.
    """
    if len(intervals) <= most:
        return intervals
    start, end = min(each.start_ns for each in intervals), max(each.end_ns for each in intervals)
    found = pieces(intervals, start, end)
    kinds = len({piece.activity for piece in found})
    width = (end - start) * kinds // (most - kinds) + 1 if most > kinds else end - start
    less = _sorted_within(found, start, width)  # fits, whatever is in a stretch; with luck half as long ones do, too
    finer = _sorted_within(found, start, width // 2 + 1) if 2 * len(less) <= most else less
    return finer if len(finer) <= most else less


def _sorted_within(found: Sequence[Piece], start_ns: int, width: int) -> list[Interval]:
    """In each stretch the first activity first, from when the first thing in it began."""
    spent: dict[int, dict[Activity, int]] = {}
    begun: dict[int, int] = {}
    for activity, begin, end in found:
        while begin < end:
            stretch = (begin - start_ns) // width
            until = min(end, start_ns + (stretch + 1) * width)
            begun.setdefault(stretch, begin)
            within = spent.setdefault(stretch, {})
            within[activity] = within.get(activity, 0) + until - begin
            begin = until
    laid = list[Piece]()
    for stretch, within in spent.items():
        at = begun[stretch]
        for activity in ACTIVITIES:
            if activity in within:
                _append(laid, Piece(activity, at, at + within[activity]))
                at += within[activity]
    return [Interval(*piece) for piece in laid]


def columns(found: Sequence[Piece], activity: Activity, start_ns: int, width_ns: float) -> list[tuple[int, int]]:
    """Columns of `width_ns` in which some of an activity lies, as [from, to); neighbours are one."""
    drawn: list[tuple[int, int]] = []
    for kind, begin, end in found:
        if kind is activity:
            first = int((begin - start_ns) / width_ns)
            last = max(int(-(-(end - start_ns) // width_ns)), first + 1)
            if drawn and first <= drawn[-1][1]:
                drawn[-1] = (drawn[-1][0], max(last, drawn[-1][1]))
            else:
                drawn.append((first, last))
    return drawn


def shares(lanes: Sequence[Lane], edges: Sequence[int]) -> Mapping[Activity, list[float]]:
    """Share of the devices that do it, in each stretch between two edges; activities that nobody does are left out."""
    whole = sum(lane.devices for lane in lanes)
    found: dict[Activity, list[float]] = {}
    for lane in lanes:
        for activity, begin, end in pieces(lane.intervals, edges[0], edges[-1]):
            filled = found.setdefault(activity, [0.0] * (len(edges) - 1))
            index = bisect_right(edges, begin) - 1
            while index < len(filled) and edges[index] < end:
                width = edges[index + 1] - edges[index]
                filled[index] += (min(end, edges[index + 1]) - max(begin, edges[index])) / width * lane.devices / whole
                index += 1
    return {activity: found[activity] for activity in ACTIVITIES if activity in found}
