"""What the core does for a completion, counted in lines of Python that it runs: it hardly grows with the groups that are live."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from rollyard import events as ev
from rollyard.bench.prepared import Play, World

FEW, MANY = 40, 400  # groups that are live
MOST = 1.2  # times as much for ten times the groups: what is looked up in an order has more to compare, and little else
NEWS = (ev.SegmentArrived, ev.Scored, ev.PromptsOffered)  # what comes for each completion


def lines(play: Play) -> float:
    """For one completion, on average over a whole run: its answer, its verdict, its part of its prompt."""
    events, conductor, count = World(play).prepare(), play.conductor(), 0

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    for event, now in events:
        sys.settrace(trace if isinstance(event, NEWS) else None)
        conductor.step(event, now)
    sys.settrace(before)
    return count / sum(isinstance(event, ev.Scored) for event, _ in events)


COLOCATED = Play(FEW, 1, 2, placement="colocated", order="longest", staleness=0)


@pytest.mark.parametrize(
    ("few", "times"),
    [
        (Play(FEW, 1, 3), {"engines": 40}),
        (Play(FEW, 1, 20), {"staleness": 39}),  # as many groups in a batch, and ten times as many batches under way
        (Play(FEW, 1, 3, order="longest"), {}),
        (Play(FEW, 1, 20, order="longest"), {"staleness": 39}),
        (Play(FEW, 1, 3, moves=1), {}),
        (Play(FEW, 1, 3, moves=1), {"engines": 40}),
        (COLOCATED, {}),
        (Play(FEW, 2, 3, filtered=0.3), {}),
    ],
)
def test_a_completion_costs_hardly_more_with_ten_times_the_groups(few: Play, times: dict[str, int]):
    few = replace(few, engines=4)
    before, after = lines(few), lines(replace(few, live=MANY, **times))
    assert after < MOST * before, f"{before:.0f} lines of Python with {FEW} groups, {after:.0f} with {MANY}"
