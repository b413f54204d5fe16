"""Slots and queue over time, held against moment by moment."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.stats import SlotsNow
from rollyard.watch.slots import SlotsLog, Stretch, thinned

TOLD = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8), st.integers(0, 8), st.integers(0, 50)), max_size=60)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TOLD, st.integers(2, 9), st.integers(1, 20))
def test_however_few_stretches_there_are_nothing_of_the_whole_is_lost(
    told: list[tuple[int, int, int, int]], most: int, finest: int
) -> None:
    log, now, busy, queue = SlotsLog(most, finest), 100, 0.0, 0.0
    log.note(now, SlotsNow(3, 4, 5))  # nothing is known of what was before
    for length, running, slots, waiting in told:
        now += length
        log.note(now, SlotsNow(min(running, slots), slots, waiting))
        busy += length * (min(running, slots) / slots if slots else 0.0)
        queue += length * waiting
    found = log.stretches()
    assert len(found) <= most + 1 and all(one.end_ns == other.start_ns for one, other in pairwise(found))
    assert now == 100 or (found[0].start_ns, found[-1].end_ns) == (100, now)
    lasted = [each.end_ns - each.start_ns for each in found]
    assert sum(each.busy * length for each, length in zip(found, lasted, strict=True)) == pytest.approx(busy)
    assert sum(each.queue * length for each, length in zip(found, lasted, strict=True)) == pytest.approx(queue)
    assert all(length >= finest for length in lasted[:-1])


def test_who_looks_as_often_as_it_is_worth_looks_a_bounded_number_of_times() -> None:
    log, looks = SlotsLog(most=16, finest_ns=10), 0
    for now in range(100_000):
        if now >= log.due_ns:
            log.note(now, SlotsNow(1, 2, now % 2))
            looks += 1
    assert looks < 16 * 4 * 14 and {each.busy for each in log.stretches()} == {0.5}


def test_fewer_of_them_are_neighbours_made_one() -> None:
    three = [Stretch(0, 10, 0.5, 4), Stretch(10, 40, 0.9, 0), Stretch(40, 50, 0.0, 8)]
    assert thinned(three, 3) == three
    assert thinned(three, 2) == [Stretch(0, 40, pytest.approx(0.8), 1.0), Stretch(40, 50, 0.0, 8)]
    ((start, end, busy, queue),) = thinned(three, 1)
    assert (start, end, busy, queue) == (0, 50, pytest.approx(0.64), pytest.approx(2.4))
