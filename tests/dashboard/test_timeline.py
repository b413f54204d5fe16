"""A stretch of the timeline, by an independent way: moment by moment."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.dashboard import timeline
from rollyard.dashboard.timeline import Drawn, Whole
from rollyard.types import Activity, Interval
from rollyard.watch.devices import Lane
from rollyard.watch.lanes import pieces
from rollyard.watch.trace import DRIVER, Mark, Traced

KINDS = (Activity.TRAIN, Activity.GENERATE, Activity.SYNC, Activity.SETUP)
INTERVALS = st.lists(
    st.builds(
        lambda kind, start, length, what: Interval(kind, start, start + length, what),
        st.sampled_from(KINDS), st.integers(0, 60), st.integers(1, 40), st.sampled_from(["", "step"]),
    ),
    max_size=12,
)  # fmt: skip


def drawn(intervals: list[Interval]) -> Drawn:
    return Drawn(Lane("engine-0", ("engine",), intervals))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(INTERVALS, st.integers(0, 50), st.integers(1, 10), st.integers(1, 6))
def test_where_there_is_no_room_each_column_has_what_took_most_of_it(
    intervals: list[Interval], start: int, width: int, columns: int
) -> None:
    end = start + width * columns  # columns of whole nanoseconds
    if not intervals:
        return
    spans = drawn(intervals)._shares(start, end, columns)
    shown = {at: kind for begin, until, kind, _ in spans for at in range(begin, until)}
    found = pieces(intervals, 0, 200)
    doing = {at: str(piece.activity) for piece in found for at in range(piece.start_ns, piece.end_ns)}
    for column in range(columns):
        moments = range(start + column * width, start + (column + 1) * width)
        spent = Counter(doing.get(at, "wait") for at in moments)
        told = {shown.get(at, "wait") for at in moments}
        assert len(told) == 1 and spent[told.pop()] == max(spent.values())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(INTERVALS, st.integers(0, 50), st.integers(1, 60))
def test_where_there_is_room_all_is_there_and_what_counts_lies_on_top(intervals: list[Interval], start: int, length: int) -> None:
    end = start + length
    lane = drawn(intervals).within(start, end, 100)
    inside = [each for each in intervals if each.end_ns > start and each.start_ns < end]
    cut = [(max(each.start_ns, start), min(each.end_ns, end), str(each.activity), each.what) for each in inside]
    assert lane.exact and sorted(lane.spans) == sorted(cut)
    on_top = {at: kind for begin, until, kind, _ in lane.spans for at in range(begin, until)}
    found = pieces(intervals, start, end)
    assert on_top == {at: str(piece.activity) for piece in found for at in range(piece.start_ns, piece.end_ns)}


def test_times_are_from_the_start_of_the_run_and_steps_are_thinned() -> None:
    at = 10**15  # a monotonic clock
    lane = Lane("engine-0", ("engine",), [Interval(Activity.GENERATE, at + 10, at + 30)])
    marks = tuple(Mark(step, at + step) for step in range(1, 101))
    whole = Whole(Traced((Lane(DRIVER, (DRIVER,), []), lane), marks, at, at + 100)).ready()
    told = whole.within(0, 2**63 - 1, 50)
    assert (told.start_ns, told.end_ns, told.whole_ns) == (0, 100, 100) and len(told.marks) == 50
    assert told.lanes[1].spans == ((10, 30, "generate", ""),) and told.lanes[0].spans == ()
    assert whole.within(20, 25, 50).lanes[1].spans == ((20, 25, "generate", ""),)
    assert whole.within(300, 400, 50).lanes == ()


def test_of_very_many_devices_some_stand_for_the_others_and_the_answer_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "SPANS", 6000)

    def did(number: int) -> list[Interval]:
        return [Interval(Activity.GENERATE, at + number, at + number + 5) for at in range(0, 2000, 10)]

    lanes = tuple(Lane(f"engine-{number}", ("engine",), did(number)) for number in range(300))
    told = Whole(Traced(lanes, (), 0, 2500)).within(0, 2500, 8000)
    assert len(told.lanes) <= timeline.LANES and sum(lane.devices for lane in told.lanes) == 300
    assert 0 < sum(len(lane.spans) for lane in told.lanes) <= 6000 and not told.lanes[0].exact
