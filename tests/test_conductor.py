"""The whole conductor over plain lists of events: runs under every placement, every engine synced before it is asked."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.types import WeightVersion
from tests.conducting import Answers, conductor, names


def test_a_run_in_its_order():
    world = Answers(conductor(steps=2), engines=1, prompts=100, seed=0)
    world.run()
    kinds = (ev.Publish, ev.Load, ev.Evaluate, ev.Sleep, ev.Train, ev.Checkpoint, ev.Wake, ev.Resume, ev.Finish)
    assert names(world, *kinds) == (
        ["Publish", "Load", "Resume", "Evaluate"]
        + ["Sleep", "Train", "Publish", "Wake", "Load", "Wake", "Resume"]
        + ["Sleep", "Train", "Checkpoint", "Publish", "Wake", "Load", "Wake", "Resume", "Evaluate", "Finish"]
    )
    assert world.said[-1] == ev.Finish("all steps are done")
    assert world.conductor.counts.trained == 4 and world.conductor.live == 0


@settings(max_examples=200, deadline=None)
@given(
    placement=st.sampled_from(("colocated", "separate", "async", "swap")),
    steps=st.integers(1, 5),
    engines=st.integers(1, 3),
    batch=st.integers(1, 4),
    prompts=st.integers(0, 12),
    evaluate=st.booleans(),
    every=st.integers(0, 2),
    save=st.integers(0, 2),
    limit=st.integers(0, 2),
    rollover=st.sampled_from(list(ev.Rollover)),
    prove=st.booleans(),
    broken=st.frozensets(st.integers(0, 11)),
    spare=st.sampled_from((0, 0, 1, 3)),
    moves=st.integers(0, 1),
    flat=st.frozensets(st.integers(0, 11)),
    refills=st.sampled_from((0, 0, 1, 99)),
    turns=st.sampled_from((0, 0, 1, 3)),
    seed=st.integers(0, 2**32),
)
def test_every_run_ends_with_its_books_in_order(
    placement,
    steps,
    engines,
    batch,
    prompts,
    evaluate,
    every,
    save,
    limit,
    rollover,
    prove,
    broken,
    spare,
    moves,
    flat,
    refills,
    turns,
    seed,
):
    engines = {"swap": 2}.get(placement, engines)
    spare = spare if limit and placement in ("async", "colocated") else 0
    limit = {"async": limit, "swap": 1, "colocated": limit if spare else 0}.get(placement, 0)
    rules = dict(spare=spare, moves=moves, refills=refills, turns=turns)
    run = conductor(steps, engines, batch, evaluate, every, save, placement, limit, rollover, prove, **rules)
    world = Answers(run, engines, prompts, seed, broken, flat=flat)
    world.run()
    assert sum(isinstance(i, ev.Finish) for i in world.said) == 1 and isinstance(world.said[-1], ev.Finish)
    counts = world.conductor.counts
    admitted = [i.prompt.id for i in world.said if isinstance(i, ev.Admit)]
    dropped = [i.group for i in world.said if isinstance(i, ev.Drop) and i.member is None]
    trained = [group for batch_ in world.batches for group in batch_]
    assert sorted(dropped + trained) == sorted(admitted) and len(set(admitted)) == len(admitted)
    assert (counts.admitted, counts.trained, sum(counts.dropped.values())) == (len(admitted), len(trained), len(dropped))
    filtered = {i.group for i in world.said if isinstance(i, ev.Drop) and i.member is None and i.reason == "filtered"}
    assert filtered <= flat and len(filtered) <= refills * (world.version + 1) and counts.refills <= len(filtered)
    assert refills < 99 or not flat & set(trained)
    whole = len(set(range(prompts)) - broken - filtered)
    assert world.version == min(steps, -(-whole // batch))
    left_over = [i.group for i in world.said if isinstance(i, ev.Drop) and i.member is None and i.reason == "oversampled"]
    assert not left_over or min(left_over) > max(trained), "what is left over at the end is the youngest"
    assert len(left_over) <= spare and (counts.dropped.get("stopped", 0) == 0 or world.version < steps)
    for step, taken in enumerate(world.batches):
        written = set.union(*(world.writers[group] for group in taken))
        assert min(written) >= step - limit, "trained on what is too old"
        if placement == "swap" and not dropped:  # what takes the place of a dropped group may be newer
            assert written == {max(step - 1, 0)}, "a batch is written by the version before"
    if world.version:
        saved = [i.version.step for i in world.said if isinstance(i, ev.Checkpoint)]
        assert saved[-1] == world.version and Counter(saved).most_common(1)[0][1] == 1
        if evaluate:
            assert [i.version.step for i in world.said if isinstance(i, ev.Evaluate)][-1] == world.version


def test_halves_trade_roles():
    world = Answers(conductor(steps=4, engines=2, placement="swap", limit=1, evaluate=False), 2, prompts=100, seed=0)
    world.run()
    assert [i.half for i in world.said if isinstance(i, ev.Train)] == ["e1", "e0", "e1", "e0"]
    handed = [i for i in world.said if isinstance(i, ev.HandOver)]
    assert handed == [ev.HandOver(WeightVersion(1 + n), f"e{1 - n % 2}", f"e{n % 2}") for n in range(3)]
    writers = {i.request.id.group // 2: i.engine for i in world.said if isinstance(i, ev.Generate)}
    assert [writers[batch] for batch in range(4)] == ["e0", "e0", "e1", "e0"]
    assert sorted(world.batches[0] + world.batches[1]) == [0, 1, 2, 3] and world.batches[2:] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("rollover", list(ev.Rollover))
def test_async_generates_while_it_trains(rollover):
    overlapped = 0
    for seed in range(60):
        run = conductor(steps=4, engines=2, placement="async", limit=1, rollover=rollover, evaluate=False)
        world = Answers(run, 2, prompts=100, seed=seed)
        while world.todo and not isinstance(world.said[-1] if world.said else None, ev.Finish):
            before = len(world.said)
            training = bool(world.busy) and any(isinstance(each, ev.BatchTrained) for each in world.todo)
            world.take(world.random.randrange(len(world.todo)))
            overlapped += training and any(isinstance(i, ev.Generate) for i in world.said[before:])
    assert overlapped > 5


@pytest.mark.parametrize("moment", range(0, 60, 3))
def test_a_stop_at_any_moment_is_clean(moment):
    world = Answers(conductor(steps=3, evaluate=True), engines=1, prompts=100, seed=moment)
    for _ in range(moment):
        world.take(0)
        if isinstance(world.said[-1], ev.Finish):
            return
    world.todo.insert(0, ev.StopRequested("Ctrl-C"))
    while not isinstance(world.said[-1] if world.said else None, ev.Finish):
        world.take(0)
    assert world.said[-1] == ev.Finish("Ctrl-C", stopped=True)
    counts = world.conductor.counts
    assert counts.admitted == counts.trained + sum(counts.dropped.values())
    assert set(counts.dropped) <= {"stopped"}
    saved = [i.version.step for i in world.said if isinstance(i, ev.Checkpoint)]
    assert saved == ([world.version] if world.version else [])


def test_losing_the_only_engine_ends_the_run():
    run = conductor()
    run.step(ev.EngineUp("e0", 3, None), 0.0)
    finish = run.step(ev.EngineDown("e0", "out of memory"), 0.0)[-1]
    assert isinstance(finish, ev.Finish) and finish.failed and "out of memory" in finish.cause
