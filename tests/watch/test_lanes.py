"""Pieces and shares by hand, and pieces against one that looks at every nanosecond by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.types import Activity, Interval
from rollyard.watch.devices import Lane
from rollyard.watch.lanes import Piece, columns, fewer, pieces, shares

A = Activity
LONG = 30
MADE = st.builds(
    lambda activity, begin, length: Interval(activity, begin, begin + length),
    st.sampled_from((A.TRAIN, A.GENERATE, A.SYNC)),
    st.integers(0, LONG),
    st.integers(0, 8),
)


def looked(intervals: Sequence[Interval], start: int, end: int) -> list[A | None]:
    order = list(A)
    open_ = ([i.activity for i in intervals if i.start_ns <= at < i.end_ns] for at in range(start, end))
    return [min(each, key=order.index) if each else None for each in open_]


@given(st.lists(MADE, max_size=6), st.integers(0, 10), st.integers(11, LONG))
def test_a_device_does_at_each_moment_what_comes_first(intervals: list[Interval], start: int, end: int) -> None:
    found = pieces(intervals, start, end)
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(found))
    told: list[A | None] = [None] * (end - start)
    for activity, begin, until in found:
        told[begin - start : until - start] = [activity] * (until - begin)
    assert told == looked(intervals, start, end)


@given(st.lists(MADE, min_size=1, max_size=12), st.integers(3, 12))
def test_in_fewer_intervals_it_does_everything_as_long_and_about_when_it_did(intervals: list[Interval], most: int) -> None:
    less = fewer(intervals, most)
    if len(intervals) <= most:
        assert less == intervals
        return
    assert len(less) <= most and all(one.end_ns <= other.start_ns for one, other in pairwise(less))
    before, after = looked(intervals, 0, 2 * LONG), looked(less, 0, 2 * LONG)
    assert Counter(before) == Counter(after)
    assert all(min(each.start_ns for each in intervals) <= each.start_ns for each in less)


def test_a_pattern_that_is_the_same_over_and_over_keeps_its_shares() -> None:
    step = ((A.GENERATE, 0, 60), (A.TRAIN, 60, 85), (A.SYNC, 90, 95))
    intervals = [Interval(kind, 100 * at + begin, 100 * at + end) for at in range(1000) for kind, begin, end in step]
    less = fewer(intervals, 200)
    assert 100 <= len(less) <= 200
    for begin, end in ((0, 100_000), (20_000, 40_000), (90_000, 100_000)):
        lane = Lane("e0", ("engine",), less)
        found = {kind: share for kind, (share,) in shares([lane], (begin, end)).items()}
        assert found == pytest.approx({A.GENERATE: 0.6, A.TRAIN: 0.25, A.SYNC: 0.05}, abs=500 / (end - begin))


def test_nothing_is_too_narrow_to_be_drawn_and_neighbours_are_one() -> None:
    found = [Piece(A.TRAIN, 0, 1), Piece(A.SYNC, 1, 5), Piece(A.TRAIN, 12, 20), Piece(A.TRAIN, 21, 29), Piece(A.TRAIN, 60, 61)]
    assert columns(found, A.TRAIN, 0, 10.0) == [(0, 3), (6, 7)]
    assert columns(found, A.SYNC, 0, 10.0) == [(0, 1)]
    assert columns(found, A.EVAL, 0, 10.0) == []


def test_shares_of_a_pool_count_each_of_its_devices() -> None:
    one = Lane("e0", ("engine",), [Interval(A.GENERATE, 0, 15), Interval(A.SYNC, 15, 20)])
    three = Lane("e1", ("engine",), [Interval(A.GENERATE, 0, 10)], devices=3)
    found = shares([one, three], (0, 10, 18, 40))
    assert list(found) == [A.GENERATE, A.SYNC]
    assert found[A.GENERATE] == pytest.approx([1.0, 5 / 8 / 4, 0.0])
    assert found[A.SYNC] == pytest.approx([0.0, 3 / 8 / 4, 2 / 22 / 4])
