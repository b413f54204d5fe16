"""The whole conductor over plain lists of events: one colocated run, every engine synced before it is asked."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.conductor import Conductor
from rollyard.place.modes import Schedule
from rollyard.rollout.core import RolloutPolicy
from rollyard.types import FinishReason, Prompt, Reward, Sampling, Segment, WeightVersion


class Answers:
    """The simplest world: does each instruction and reports it, in a random order."""

    def __init__(self, conductor: Conductor, engines: int, prompts: int, seed: int, broken: frozenset[int] = frozenset()):
        self.conductor, self.random, self.prompts, self.broken = conductor, random.Random(seed), prompts, broken
        self.cursor = 0
        self.said: list[ev.Instruction] = []
        self.todo: list[ev.Event] = [ev.EngineUp(f"e{i}", 3, None) for i in range(engines)]
        self.loaded: dict[str, int] = {}
        self.asleep: set[str] = set()
        self.version = 0

    def run(self) -> None:
        for _ in range(20_000):
            if not self.todo or any(isinstance(i, ev.Finish) for i in self.said):
                return
            self.take(self.random.randrange(len(self.todo)))
        raise AssertionError("no end in sight")

    def take(self, index: int) -> None:
        """One of the events that are due happens."""
        event = self.todo.pop(index)
        if isinstance(event, ev.EngineLoaded):
            self.loaded[event.engine] = event.version.step
        for instruction in self.conductor.step(event, 0.0):
            self.said.append(instruction)
            self.todo += self.answer(instruction)

    def answer(self, instruction: ev.Instruction) -> list[ev.Event]:
        match instruction:
            case ev.FetchPrompts(count):
                ids = range(self.cursor, min(self.cursor + count, self.prompts))
                self.cursor = ids.stop
                found = tuple(Prompt(i, i, (1, 2), f"p{i}") for i in ids)
                return [ev.PromptsOffered(found, self.cursor == self.prompts)]
            case ev.Generate(engine, request):
                assert self.loaded[engine] == self.version and engine not in self.asleep
                version = WeightVersion(self.version)
                return [ev.SegmentArrived(engine, Segment(request.id, (5,), (-1.0,), version, version, FinishReason.STOP), "x")]
            case ev.Score(prompt, completion):
                value = None if prompt.id in self.broken else float(completion.member)
                return [ev.Scored(prompt.id, completion.member, Reward(value))]
            case ev.Sleep(engine):
                self.asleep.add(engine)
                return [ev.EngineSlept(engine)]
            case ev.Wake(engine, part):
                if part is ev.WakePart.CACHE:
                    assert self.loaded[engine] == self.version, "the cache wakes after the load"
                    self.asleep.discard(engine)
                return [ev.EngineWoke(engine, part)]
            case ev.Train(step, _):
                assert step == self.version and self.asleep == set(self.loaded)
                self.version += 1
                return [ev.BatchTrained(WeightVersion(self.version))]
            case ev.Publish(version):
                return [ev.Published(version), ev.Delivered(version)]
            case ev.Prepare(engine, version):
                return [ev.EnginePrepared(engine, version)]
            case ev.Prove(version):
                return [ev.Proved(version)]
            case ev.Pause(engine, _):
                return [ev.EnginePaused(engine)]
            case ev.Load(engine, version):
                return [ev.EngineLoaded(engine, version)]
            case ev.Resume(engine):
                return [ev.EngineResumed(engine)]
            case ev.Evaluate(version):
                assert set(self.loaded.values()) == {version.step}
                return [ev.Evaluated(version)]
            case ev.Checkpoint(version):
                return [ev.Checkpointed(version)]
        return []


def conductor(
    steps: int = 3, engines: int = 1, batch: int = 2, evaluate: bool = True, every: int = 0, save: int = 0
) -> Conductor:
    policy = RolloutPolicy(group_size=2, groups_per_batch=batch, batches=steps, sampling=Sampling(4), window=50)
    return Conductor(policy, Schedule(steps, engines, evaluate, every, save), ev.Rollover.DRAIN, WeightVersion(0))


def names(world: Answers, *kinds: type) -> list[str]:
    return [type(i).__name__ for i in world.said if isinstance(i, kinds)]


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


@settings(max_examples=100, deadline=None)
@given(
    steps=st.integers(1, 5),
    engines=st.integers(1, 3),
    batch=st.integers(1, 4),
    prompts=st.integers(0, 12),
    evaluate=st.booleans(),
    every=st.integers(0, 2),
    save=st.integers(0, 2),
    broken=st.frozensets(st.integers(0, 11)),
    seed=st.integers(0, 2**32),
)
def test_every_run_ends_with_its_books_in_order(steps, engines, batch, prompts, evaluate, every, save, broken, seed):
    world = Answers(conductor(steps, engines, batch, evaluate, every, save), engines, prompts, seed, broken)
    world.run()
    assert sum(isinstance(i, ev.Finish) for i in world.said) == 1 and isinstance(world.said[-1], ev.Finish)
    counts = world.conductor.counts
    admitted = [i.prompt.id for i in world.said if isinstance(i, ev.Admit)]
    dropped = [i.group for i in world.said if isinstance(i, ev.Drop) and i.member is None]
    trained = [g.id for i in world.said if isinstance(i, ev.Train) for g in i.groups]
    assert sorted(dropped + trained) == sorted(admitted) and len(set(admitted)) == len(admitted)
    assert (counts.admitted, counts.trained, sum(counts.dropped.values())) == (len(admitted), len(trained), len(dropped))
    whole = len(set(range(prompts)) - broken)
    assert world.version == min(steps, -(-whole // batch))
    if world.version:
        saved = [i.version.step for i in world.said if isinstance(i, ev.Checkpoint)]
        assert saved[-1] == world.version and Counter(saved).most_common(1)[0][1] == 1
        if evaluate:
            assert [i.version.step for i in world.said if isinstance(i, ev.Evaluate)][-1] == world.version


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
    assert world.said[-1] == ev.Finish("Ctrl-C")
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
