from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.types import Activity, Interval
from rollyard.watch.spans import MESSAGE, NEWS, Burst, News, SpanLog, hear, tell, telling
from tests.place.lines import joined

GENERATE, SYNC, TRAIN = Activity.GENERATE, Activity.SYNC, Activity.TRAIN


class Clock:
    now = 100

    def __call__(self) -> int:
        return self.now


def test_what_goes_on_without_a_gap_is_one_interval() -> None:
    spans = SpanLog()
    for start, end in ((0, 10), (10, 20), (21, 30), (25, 28)):
        spans.add(GENERATE, start, end)
    spans.add(SYNC, 30, 31, "load")
    spans.add(SYNC, 31, 40, "resume")
    assert spans.drain() == (
        Interval(GENERATE, 0, 20),
        Interval(GENERATE, 21, 30),
        Interval(SYNC, 30, 31, "load"),
        Interval(SYNC, 31, 40, "resume"),
    )
    assert spans.drain() == ()


def test_a_call_is_timed_where_it_happens_and_when_it_raises_too() -> None:
    clock = Clock()
    spans = SpanLog(clock)

    def step(by: int) -> int:
        clock.now += by
        if by > 5:
            raise ValueError("too far")
        return by

    assert spans.timed(TRAIN, step, "step")(3) == 3
    with pytest.raises(ValueError, match="too far"):
        spans.timed(TRAIN, step)(7)
    assert spans.drain() == (Interval(TRAIN, 100, 103, "step"), Interval(TRAIN, 103, 110))


def test_a_message_is_bounded_and_nothing_is_lost() -> None:
    spans = SpanLog()
    made = [Interval(GENERATE, 10 * n, 10 * n + 1) for n in range(2 * MESSAGE + 5)]
    for interval in made:
        spans.add(*interval)
    parts = [spans.drain() for _ in range(4)]
    assert [len(part) for part in parts] == [MESSAGE, MESSAGE, 5, 0]
    assert [interval for part in parts for interval in part] == made


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=30), st.sets(st.integers(0, 29)))
def test_a_burst_is_the_time_with_work_however_often_it_is_drained(moves: list[tuple[int, int]], drains: set[int]) -> None:
    """0: a tick; 1: work comes; 2: all work is done; 3: time passes without a word."""
    clock = Clock()
    spans, taken, busy, expected, unheard = SpanLog(clock), [], False, 0, 0
    burst = Burst(spans)
    for number, (move, by) in enumerate(moves):
        clock.now += by
        unheard += by * busy
        if move == 0:
            burst.tick(GENERATE)
            expected, unheard = expected + unheard, 0
        elif move == 1:
            burst.go()
            busy = True
        elif move == 2:
            burst.rest()  # what was not told of before is not counted
            busy, unheard = False, 0
        if number in drains:
            taken += spans.drain()
    taken += spans.drain()
    assert sum(interval.end_ns - interval.start_ns for interval in taken) == expected
    assert all(one.end_ns <= two.start_ns for one, two in pairwise(taken))


def test_threads_add_while_another_drains() -> None:
    spans, taken = SpanLog(), []

    def work(activity: Activity) -> None:
        for n in range(3000):
            spans.add(activity, 2 * n, 2 * n + 1)

    threads = [threading.Thread(target=work, args=(activity,)) for activity in (GENERATE, SYNC)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += spans.drain()
    while new := spans.drain():
        taken += new
    assert sorted(taken) == sorted(Interval(activity, 2 * n, 2 * n + 1) for activity in (GENERATE, SYNC) for n in range(3000))


async def test_what_one_process_did_is_known_in_another_before_its_answer() -> None:
    near, far = await joined("the trainer", "the run")
    spans, heard = SpanLog(), hear(near)

    async def step(content: bytes) -> bytes:
        spans.add(TRAIN, 5, 9, "step")
        tell(spans, far)
        return b""

    far.handle("step", step)
    for line in (near, far):
        line.ready()
    await near.call("step", limit_s=5.0)
    assert heard.drain() == (Interval(TRAIN, 5, 9, "step"),)
    async with telling(spans, far):
        spans.add(SYNC, 10, 11)
        async with asyncio.timeout(10):
            while not (told := heard.drain()):  # noqa: ASYNC110 (nothing tells of what came)
                await asyncio.sleep(0.01)
        assert told == (Interval(SYNC, 10, 11),)
        await near.close()  # nobody listens any more: that ends the telling, and nothing else
        spans.add(SYNC, 12, 13)
        await asyncio.sleep(0.3)
    await far.close()


async def test_another_machine_has_another_clock() -> None:
    """It was booted 10^15 ns ago; a message takes as long as it takes, and the fastest counts."""
    near, far = await joined("the trainer", "the run")
    heard = hear(near)
    near.ready()
    far.ready()
    for late in (5_000_000_000, 0, 9_000_000_000):
        sent = 10**15 + time.monotonic_ns() - late
        news = News("elsewhere", sent, (Interval(TRAIN, sent - 200, sent - 100),))
        far.tell("spans", NEWS.dump_json(news))
        async with asyncio.timeout(10):
            while not (told := heard.drain()):  # noqa: ASYNC110 (nothing tells of what came)
                await asyncio.sleep(0.001)
        (interval,) = told
        assert interval.end_ns - interval.start_ns == 100
        true_end = sent - 10**15 - 100
        assert true_end <= interval.end_ns <= true_end + late + 2_000_000_000
        if late:
            continue
        assert interval.end_ns <= time.monotonic_ns()
    assert interval.end_ns < true_end + 2_000_000_000  # the slow one did not spoil what was known
    await near.close()
    await far.close()
