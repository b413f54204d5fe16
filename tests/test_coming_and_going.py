"""The whole conductor where engines are lost, come back, are added and leave."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.fitness import Condemn
from tests.conducting import Answers, Work, conductor


@settings(max_examples=200, deadline=None)
@given(
    placement=st.sampled_from(("separate", "async")),
    engines=st.integers(1, 3),
    deaths=st.integers(0, 4),
    restarts=st.integers(0, 2),
    faults=st.integers(0, 3),
    evaluate=st.booleans(),
    limit=st.integers(0, 2),
    prompts=st.sampled_from((100, 5)),
    rollover=st.sampled_from(list(ev.Rollover)),
    seed=st.integers(0, 2**32),
)
def test_engines_that_are_lost_come_back_as_often_as_is_allowed(
    placement, engines, deaths, restarts, faults, evaluate, limit, prompts, rollover, seed
):
    run = conductor(
        4,
        engines,
        2,
        evaluate,
        1,
        0,
        placement,
        limit if placement == "async" else 0,
        rollover,
        restarts=restarts,
        retries=faults,
    )
    world = Answers(run, engines, prompts, seed, deaths=deaths, faults=faults)
    world.run()
    end = world.said[-1]
    assert isinstance(end, ev.Finish) and sum(isinstance(i, ev.Finish) for i in world.said) == 1
    counts = world.conductor.counts
    assert counts.admitted == counts.trained + sum(counts.dropped.values())
    assert len(world.batches) == world.version, "what is being trained when the run fails is trained first"
    assert counts.trained == sum(map(len, world.batches))
    again = Counter(i.engine for i in world.said if isinstance(i, ev.Restart))
    assert all(times <= restarts for times in again.values())
    assert all(again[engine] == restarts for engine in world.gone), "it might have been started again"
    assert end.failed or world.gone == world.doomed
    if end.failed:  # all are lost for good, or a member was lost with more engines than it may be tried on
        assert "no engine is left: killed" in end.cause
        assert all(again[f"e{i}"] == restarts for i in range(engines))
    else:
        assert world.version == 4 or (world.version == 3 and prompts == 5) or counts.dropped


@settings(max_examples=200, deadline=None)
@given(
    placement=st.sampled_from(("separate", "async")),
    engines=st.integers(1, 3),
    unfit=st.integers(0, 3),
    doubts=st.integers(0, 2),
    restarts=st.integers(0, 2),
    faults=st.sampled_from((0, 0, 2)),
    prove=st.booleans(),
    rollover=st.sampled_from(list(ev.Rollover)),
    seed=st.integers(0, 2**32),
)
def test_engines_that_are_not_fit_are_replaced(placement, engines, unfit, doubts, restarts, faults, prove, rollover, seed):
    """They get the newest version before a request, which `Answers` looks at; a second doubt of one engine ends the run."""
    limit = int(placement == "async")
    rules = dict(restarts=restarts, retries=faults, probes=1)
    run = conductor(5, engines, 2, True, 2, 0, placement, limit, rollover, prove, **rules)
    world = Answers(run, engines, 200, seed, faults=faults, unfit=unfit, doubts=doubts)
    world.run()
    end, counts = world.said[-1], world.conductor.counts
    assert isinstance(end, ev.Finish) and sum(isinstance(i, ev.Finish) for i in world.said) == 1
    assert counts.admitted == counts.trained + sum(counts.dropped.values()) and world.conductor.live == 0
    condemned = Counter(i.engine for i in world.said if isinstance(i, Condemn))
    again = Counter(i.engine for i in world.said if isinstance(i, ev.Restart))
    doubted = Counter(i.engine for i in world.said if isinstance(i, Condemn) and i.cause == "it has other weights")
    assert set(counts.dropped) <= {"stopped", "distrusted", "failed"} and (doubted or "distrusted" not in counts.dropped)
    assert sum(condemned.values()) > 2 or "failed" not in counts.dropped, "a member is tried three times"
    assert all(again[engine] <= restarts for engine in again) and sum(again.values()) <= sum(condemned.values())
    if not end.failed:
        assert world.version == 5 and all(times == 1 for times in doubted.values())
    elif end.cause == "it has other weights":
        assert any(times > 1 or again[engine] == restarts for engine, times in doubted.items())
    else:
        assert "no engine is left" in end.cause and all(condemned[f"e{i}"] > restarts for i in range(engines))


class Gone(Answers):
    """What is lost does not come back: no node has room for it."""

    def rollouts(self, instruction: ev.Instruction) -> list[ev.Event | Work]:
        return [] if isinstance(instruction, ev.Restart) else super().rollouts(instruction)


@pytest.mark.parametrize("seed", range(20))
def test_the_end_does_not_wait_for_an_engine_that_may_come_back(seed):
    world = Gone(conductor(4, 2, 2, True, 0, 0, "async", 1, restarts=1), 2, 100, seed, deaths=1)
    world.run()
    assert isinstance(world.said[-1], ev.Finish) and not world.said[-1].failed
    assert world.version == 4


@settings(max_examples=300, deadline=None)
@given(
    placement=st.sampled_from(("separate", "async")),
    engines=st.integers(1, 3),
    joins=st.integers(0, 3),
    leaves=st.integers(0, 4),
    deaths=st.sampled_from((0, 0, 2)),
    faults=st.sampled_from((0, 0, 2)),
    evaluate=st.booleans(),
    prove=st.booleans(),
    limit=st.integers(0, 2),
    moves=st.integers(0, 1),
    turns=st.sampled_from((0, 0, 1, 3)),
    rollover=st.sampled_from(list(ev.Rollover)),
    seed=st.integers(0, 2**32),
)
def test_engines_come_and_go(
    placement, engines, joins, leaves, deaths, faults, evaluate, prove, limit, moves, turns, rollover, seed
):
    limit = limit if placement == "async" else 0
    rules = dict(restarts=2, retries=faults, moves=moves, turns=turns)
    run = conductor(5, engines, 2, evaluate, 2, 0, placement, limit, rollover, prove, **rules)
    world = Answers(run, engines, 100, seed, deaths=deaths, faults=faults, joins=joins, leaves=leaves)
    world.run()
    end = world.said[-1]
    assert isinstance(end, ev.Finish) and sum(isinstance(i, ev.Finish) for i in world.said) == 1
    counts = world.conductor.counts
    assert counts.admitted == counts.trained + sum(counts.dropped.values()) and world.conductor.live == 0
    assert not end.failed or (deaths and "no engine is left" in end.cause)
    assert end.failed or (world.version == 5 and world.doomed <= world.gone)
    for step, taken in enumerate(world.batches):
        assert min(set.union(*(world.writers[group] for group in taken))) >= step - limit, "trained on what is too old"
    if not deaths:
        assert set(counts.dropped) <= {"stopped"} and counts.retries == 0
        proofs = sum(isinstance(i, ev.Prove) for i in world.said)
        assert proofs <= prove * (1 + 3 - world.joins)


@pytest.mark.parametrize("cut", [False, True])
def test_an_engine_that_leaves_gives_up_nothing(cut):
    world = Answers(conductor(steps=4, engines=2, batch=4, placement="separate"), 2, prompts=100, seed=1)
    while not any(world.running(engine) for engine in ("e0", "e1")):
        world.take(0)
    assert world.running("e0")
    world.leaves = 1
    before = len(world.said)
    world.leave("e0", cut)
    moved = [i for i in world.said[before:] if isinstance(i, ev.Move)]
    assert bool(moved) is cut and all(i.engine == "e0" and i.to is None for i in moved)
    world.run()
    assert [i.engine for i in world.said if isinstance(i, ev.Retire)] == ["e0"]
    assert world.said[-1] == ev.Finish("all steps are done") and world.conductor.counts.dropped == {}


def test_an_engine_that_comes_has_the_newest_weights_and_is_proved_before_its_first_request():
    world = Answers(conductor(steps=6, placement="async", limit=1, prove=True), 1, prompts=100, seed=3)
    while not world.batches:
        world.take(0)
    before = len(world.said)
    world.todo.append(ev.EngineUp("j0", 3, None))
    world.run()
    own = [type(i).__name__ for i in world.said[before:] if getattr(i, "engine", "") == "j0" or isinstance(i, ev.Prove)]
    assert own.index("Load") < own.index("Prove") < own.index("Generate")
    assert world.said[-1] == ev.Finish("all steps are done")
