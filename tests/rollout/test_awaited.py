"""New weights come to one engine after the other: the first to have them leaves the others their share of what waits."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.rollout.awaited import Awaited
from rollyard.rollout.core import RolloutCore
from rollyard.types import FinishReason, RequestId, Segment, WeightVersion
from tests.rollout.test_core import generates, opened, policy, prompts
from tests.rollout.world import Odds, World

V0, V1 = WeightVersion(0), WeightVersion(1)


class Fleet:
    """Engines of version 0, each with its slots, and what they run."""

    def __init__(self, *slots: int, groups: int, **changes) -> None:
        self.core: RolloutCore = opened(policy(**(dict(group_size=4, groups_per_batch=groups, min_scored=1) | changes)))
        self.names = [f"e{number}" for number in range(len(slots))]
        self.running: Counter[str] = Counter()
        self.requests: dict[RequestId, str] = {}
        for name, room in zip(self.names, slots, strict=True):
            self.tell(ev.EngineUp(name, room, V0))

    def tell(self, *messages: ev.Event | ev.Signal) -> None:
        for message in messages:
            for said in generates(self.core.step(message, 0.0)):
                self.running[said.engine] += 1
                self.requests[said.request.id] = said.engine

    def offer(self) -> None:
        """Version 1 to all, which stand still till they have it; prompts wait meanwhile."""
        self.tell(ev.EnginesAwaited(tuple(self.names)), *map(ev.EngineHeld, self.names))
        count = self.core._policy.groups_per_batch
        self.tell(ev.PromptsOffered(prompts(*range(count), tokens=10), exhausted=True))
        assert not self.running

    def give(self, name: str) -> None:
        self.tell(ev.EngineLoaded(name, V1), ev.EngineReleased(name))

    def end(self, name: str) -> None:
        request = next(request for request, engine in self.requests.items() if engine == name)
        del self.requests[request]
        self.running[name] -= 1
        self.tell(ev.SegmentArrived(name, Segment(request, (1,), (-1.0,), V1, V1, FinishReason.STOP)))


@pytest.mark.parametrize("slots", [64, 10])
def test_whoever_has_new_weights_first_takes_its_share(slots: int) -> None:
    fleet = Fleet(slots, slots, slots, slots, groups=10)
    fleet.offer()
    for number, name in enumerate(fleet.names, 1):
        fleet.give(name)
        assert fleet.running == dict.fromkeys(fleet.names[:number], 10)


def test_engines_with_more_in_flight_get_less() -> None:
    """e0 goes on with 12 of 12 tokens, e1 with none: of 40 that wait, with 10 tokens each, e1 takes 12 or 13 more."""
    fleet = Fleet(99, 99, groups=13)
    fleet.tell(ev.EnginesAwaited(("e1",)), ev.EngineHeld("e1"))
    fleet.tell(ev.PromptsOffered(prompts(*range(3), tokens=12), exhausted=False))
    fleet.give("e1")
    assert fleet.running == {"e0": 6, "e1": 6}
    fleet.tell(ev.EnginesAwaited(("e1",)), ev.EngineHeld("e1"))
    fleet.tell(ev.PromptsOffered(prompts(*range(3, 13), tokens=10), exhausted=True))
    assert fleet.running == {"e0": 26, "e1": 6}
    fleet.give("e1")
    assert fleet.running == {"e0": 26, "e1": 26}


@pytest.mark.parametrize("gone", [ev.EnginesMissed(("e1",)), ev.EngineDown("e1", "killed"), ev.EngineLeaving("e1", cut=False)])
def test_nothing_waits_for_an_engine_that_does_not_come(gone: ev.Event | ev.Signal) -> None:
    fleet = Fleet(64, 64, groups=10)
    fleet.offer()
    fleet.give("e0")
    assert fleet.running == {"e0": 20}
    fleet.tell(gone)
    assert fleet.running == {"e0": 40}


def test_while_an_engine_keeps_others_waiting_each_end_lets_one_go() -> None:
    fleet = Fleet(64, 64, groups=10)
    fleet.offer()
    fleet.give("e0")
    for ended in range(1, 21):
        fleet.end("e0")
        assert fleet.running == {"e0": 20}, f"after {ended} of 20 that wait"
    fleet.end("e0")
    assert fleet.running == {"e0": 19}
    fleet.give("e1")
    assert fleet.running == {"e0": 19}, "nothing is left"


def test_what_ended_for_an_engine_that_came_is_not_counted_for_another() -> None:
    fleet = Fleet(64, 64, groups=2)
    fleet.offer()
    fleet.give("e0")
    fleet.give("e1")
    fleet.tell(ev.EnginesAwaited(("e1",)))
    fleet.end("e0")
    fleet.tell(ev.EnginesMissed(("e1",)), ev.EnginesAwaited(("e1",)))
    assert not fleet.core._router.awaited.leave(99, waiting=1)


def test_where_versions_are_exact_nobody_is_awaited() -> None:
    """Swap: whoever comes may have weights that are too new."""
    fleet = Fleet(64, 64, groups=10, exact=True)
    fleet.tell(ev.EnginesAwaited(("e1",)), ev.EngineHeld("e1"))
    fleet.tell(ev.PromptsOffered(prompts(*range(10), tokens=10), exhausted=True))
    assert fleet.running == {"e0": 40}


def test_a_slow_engine_is_left_less() -> None:
    """Where it is 4 times slower what it holds, and what it would get, weigh 4 times as much."""
    awaited = Awaited()
    awaited.file("slow", 40, 4, free=True)
    assert not awaited.leave(80, waiting=10)
    assert awaited.leave(80, waiting=11)


@given(
    engines=st.lists(st.tuples(st.integers(0, 3000), st.sampled_from([1, 1, 1, 3]), st.booleans()), max_size=12),
    changes=st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3000), st.booleans()), max_size=12),
    weight=st.integers(0, 4000),
    waiting=st.integers(1, 9000),
)
def test_what_is_left_to_others_is_no_more_than_what_they_can_take(engines, changes, weight: int, waiting: int) -> None:
    awaited, truth = Awaited(), dict(enumerate(engines))
    for number, (holds, slowness, free) in truth.items():
        awaited.file(str(number), holds, slowness, free)
    for number, holds, stays in changes:
        if number in truth and stays:
            truth[number] = holds, *truth[number][1:]
            awaited.file(str(number), *truth[number])
        elif truth.pop(number, None):
            awaited.discard(str(number))
    assert {engine for engine in map(str, range(12)) if engine in awaited} == set(map(str, truth))
    below = [max(0, weight - holds) / Fraction(slowness) for holds, slowness, free in truth.values() if free]
    if awaited.leave(weight, waiting):
        smaller = sum(max(0, weight - 2 * holds - 1) / Fraction(slowness) for holds, slowness, free in truth.values() if free)
        assert smaller < waiting, "those that hold half as much can take it"
    else:
        assert sum(below) >= waiting


@settings(max_examples=100, deadline=None)
@given(
    staleness=st.integers(0, 2),
    engines=st.integers(2, 4),
    slots=st.integers(1, 6),
    moves=st.integers(0, 1),
    rollover=st.sampled_from(list(ev.Rollover)),
    odds=st.sampled_from([Odds(), Odds(error=0.1), Odds(0.05, 0.0, 0.1, 0.05)]),
    seed=st.integers(0, 2**32),
)
def test_a_run_ends_although_an_engine_never_comes(staleness, engines, slots, moves, rollover, odds, seed) -> None:
    world = World(policy(max_staleness=staleness, moves=moves), 30, engines, slots, seed, odds, rollover)
    start = world.start

    def begin() -> None:
        start()
        world.stick("e0")

    world.start = begin  # type: ignore[method-assign]
    world.end_all()
