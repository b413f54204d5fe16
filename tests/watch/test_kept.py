"""The timeline of several lives: one after the other, in a file that is read back, and what of it counts for whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.errors import JournalError
from rollyard.types import Activity, Interval
from rollyard.watch.devices import Lane
from rollyard.watch.kept import EMPTY, coarse, joined, read_kept, traces_last, with_news, with_trace, write_kept
from rollyard.watch.slots import Stretch
from rollyard.watch.trace import Mark, Traced, write_trace

A = Activity


def lane(name: str, *intervals: tuple[Activity, int, int], **more: int) -> Lane:
    return Lane(name, ("driver" if name == "driver" else "engine",), [Interval(*each) for each in intervals], **more)


def life(start: int = 1000) -> Traced:
    """Of 100 ns: two engines, of which one came later, and two steps."""
    lanes = (
        lane("driver", (A.SCORE, start + 40, start + 45)),
        lane("engine-0", (A.SETUP, start, start + 10), (A.GENERATE, start + 20, start + 50)),
        lane("engine-1", (A.GENERATE, start + 60, start + 90), since_ns=start + 55),
    )
    slots = [Stretch(start + 10, start + 60, 0.5, 3.0), Stretch(start + 60, start + 100, 1.0, 0.0)]
    return Traced(lanes, (Mark(1, start + 50), Mark(2, start + 95)), start, start + 100, slots=slots)


def same(one: Traced, other: Traced) -> bool:
    def plain(traced: Traced) -> object:
        lanes = [(each._replace(intervals=()), sorted(each.intervals)) for each in traced.lanes]
        return lanes, traced.marks, traced.start_ns, traced.end_ns, tuple(traced.slots), traced.lives

    return plain(one) == plain(other)


def test_one_life_follows_the_other_without_a_gap() -> None:
    first, second = joined(EMPTY, life(1000)), replace(life(7), lanes=life(7).lanes[:2])
    assert same(first, life(0))
    both = joined(first, second)
    assert (both.start_ns, both.end_ns, both.lives) == (0, 200, (100,))
    driver, zero, one = both.lanes
    assert driver.intervals == [Interval(A.SCORE, 40, 45), Interval(A.SCORE, 140, 145)]
    assert zero.intervals[2:] == [Interval(A.SETUP, 100, 110), Interval(A.GENERATE, 120, 150)] and zero.until_ns is None
    assert (one.since_ns, one.until_ns) == (55, 100), "it did not come back"
    assert both.marks == (Mark(1, 50), Mark(2, 95), Mark(1, 150), Mark(2, 195))
    assert [each[:2] for each in both.slots] == [(10, 60), (60, 100), (110, 160), (160, 200)]
    again = joined(both, life())
    assert (again.lives, again.end_ns, len(again.lanes)) == ((100, 200), 300, 3) and again.lanes[2].until_ns is None


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    assert read_kept(path) is None
    write_kept(path, EMPTY, life(1000), whole=True)
    kept = read_kept(path)
    assert kept is not None and same(kept.traced, life(0)) and (kept.clock_ns, kept.whole) == (1000, True)
    assert kept.earlier == EMPTY
    write_kept(path, kept.traced, life(500), whole=False)
    both = read_kept(path)
    assert both is not None and same(both.traced, joined(life(0), life(500)))
    assert same(both.earlier, life(0)) and (both.clock_ns, both.began_ns, both.whole) == (500, 100, False)
    for broken in (b"", b"\x00" * 80, b"{}", path.read_bytes()[:-40], b"[1, 2]"):
        path.write_bytes(broken)
        with pytest.raises(JournalError, match="not a timeline"):
            read_kept(path)


def test_the_trace_of_the_last_life_counts_and_no_other(tmp_path: Path) -> None:
    path, trace = tmp_path / "timeline.json", tmp_path / "trace.json"
    finer = replace(life(0), lanes=(*life(0).lanes, lane("engine-2", (A.EVAL, 10, 20))))
    write_trace(trace, finer)
    write_kept(path, EMPTY, life(1000), whole=True)
    kept = read_kept(path)
    assert kept is not None and traces_last(kept, trace) and traces_last(None, trace)
    assert same(with_trace(kept, trace), finer) and same(with_trace(None, trace), finer)
    write_kept(path, kept.traced, life(500), whole=False)
    killed = read_kept(path)
    assert killed is not None and not traces_last(killed, trace), "it is that of the first life"
    write_kept(path, kept.traced, life(500), whole=True)
    ended = read_kept(path)
    assert ended is not None and same(with_trace(ended, trace), joined(life(0), finer))


def test_what_was_heard_counts_where_it_is_newer(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    write_kept(path, life(0), life(1000), whole=False)
    kept = read_kept(path)
    assert kept is not None
    heard = replace(life(1000), end_ns=1140, marks=(*life(1000).marks, Mark(3, 1120)), slots=())
    for going in (True, False):
        newer = with_news(kept, heard, going=going)
        assert newer.end_ns == 240 and newer.marks[-1] == Mark(3, 220) and newer.lives == (100,)
        assert list(newer.slots) == list(kept.slots), "who listens is told nothing of them"
        assert same(with_news(kept, replace(heard, end_ns=1050), going=going), kept.traced), "who listened left early"
        assert with_news(None, heard, going=going) == heard and same(with_news(kept, None, going=going), kept.traced)
    later = replace(heard, start_ns=5000, end_ns=5070)
    assert with_news(kept, later, going=True).lives == (100, 200), "a life that has kept nothing yet"
    assert same(with_news(kept, later, going=False), kept.traced), "an earlier one, as nobody heard the last"


def test_of_many_lives_no_more_is_kept_than_of_a_few() -> None:
    def busy(start: int) -> Traced:
        spans = [(A.GENERATE if at % 2 else A.SYNC, start + 20_000 * at, start + 20_000 * at + 9_000) for at in range(500)]
        marks = tuple(Mark(step, start + 50_000 * step) for step in range(200))
        slots = [Stretch(start + 5_000 * at, start + 5_000 * at + 5_000, 1.0, 2.0) for at in range(2000)]
        return Traced((lane("engine-0", *spans), lane("driver")), marks, start, start + 10_000_000, slots=slots)

    past = EMPTY
    for number in range(20):
        past = coarse(joined(past, busy(number)), 400)
        assert sum(len(each.intervals) for each in past.lanes) <= 400 and len(past.marks) <= 200 and len(past.slots) <= 1024
    assert past.end_ns == 20 * 10_000_000 and len(past.lives) == 19
    assert past.slots[0].start_ns == 0 and past.slots[-1].end_ns == past.end_ns
