"""The whole conductor over plain lists of events: runs under every placement, every engine synced before it is asked."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard import events as ev
from rollyard.conductor import Conductor
from rollyard.place.mode import Schedule
from rollyard.rollout.policy import RolloutPolicy
from rollyard.turns import Asked, EpisodeEnded, Play, Tell
from rollyard.types import Asking, FinishReason, Prompt, Request, RequestId, Reward, Sampling, Segment, WeightVersion

PUBLISHING = "publishing"


@dataclass(frozen=True)
class Work:
    """A request that an engine holds."""

    engine: str
    request: Request


class Answers:
    """The simplest world: does each instruction and reports it, in a random order, and holds everybody to the rules."""

    def __init__(
        self,
        conductor: Conductor,
        engines: int,
        prompts: int,
        seed: int,
        broken: frozenset[int] = frozenset(),
        deaths: int = 0,
        faults: int = 0,
        joins: int = 0,
        leaves: int = 0,
        flat: frozenset[int] = frozenset(),
    ):
        self.flat = flat  # prompts whose verdicts are all equal
        self.joins, self.leaves = joins, leaves  # engines that will come, and go
        self.leaving: set[str] = set()
        self.gone: set[str] = set()  # they were retired
        self.doomed: set[str] = set()  # lost, and not started again
        self.proving = False
        self.faults = faults
        self.deaths = deaths  # engines that will be lost, some of them while they start again
        self.conductor, self.random, self.prompts, self.broken = conductor, random.Random(seed), prompts, broken
        self.cursor = 0
        self.said: list[ev.Instruction] = []
        self.todo: list[ev.Event | Work] = [ev.EngineUp(f"e{i}", 3, None) for i in range(engines)]
        self.loaded: dict[str, int] = {}
        self.dead: set[str] = set()
        self.up: set[str] = set()
        self.evaluating: set[str] = set()
        self.offered: tuple[WeightVersion | None, tuple[str, ...]] = (None, ())
        self.closed: dict[str, ev.Rollover] = {}  # engines between a pause and a resume
        self.asleep: set[str] = set()
        self.loading: set[str] = set()  # engines that woke and have not loaded
        self.versions: dict[str | None, int] = {None: 0, **{f"e{i}": 0 for i in range(engines)}}  # of the trainer, or of halves
        self.busy: set[str | None] = set()  # trainers whose parameters must not be touched
        self.batches: list[list[int]] = []
        self.writers: dict[int, set[int]] = {}  # versions that wrote, by group

    @property
    def version(self) -> int:
        return max(self.versions.values())

    def run(self) -> None:
        for _ in range(50_000):
            if not self.todo or any(isinstance(i, ev.Finish) for i in self.said):
                return
            if self.joins and not self.random.randrange(15):
                self.joins -= 1
                self.todo.append(ev.EngineUp(f"j{self.joins}", 3, None))
            if self.leaves and len(self.conductor.staying) > 1 and not self.random.randrange(15):
                self.leave(self.random.choice(sorted(self.conductor.staying)), self.random.random() < 0.5)
            if self.deaths and self.loaded and not self.random.randrange(20):
                self.kill(self.random.choice(sorted(self.loaded)))
            self.take(self.random.randrange(len(self.todo)))
        raise AssertionError("no end in sight")

    def leave(self, engine: str, cut: bool) -> None:
        """It is told to go."""
        self.leaves -= 1
        self.leaving.add(engine)
        self.todo.insert(0, ev.EngineLeaving(engine, cut))
        self.take(0)

    def kill(self, engine: str) -> None:
        """It is gone, and what it had not said with it."""
        self.deaths -= 1
        self.dead.add(engine)
        self.up.discard(engine)
        self.todo = [each for each in self.todo if getattr(each, "engine", None) != engine]
        self.todo.insert(0, ev.EngineDown(engine, "killed"))
        cut = [each for each in self.todo if isinstance(each, ev.Evaluated)]
        if cut and not self.up:
            self.todo = [each for each in self.todo if each not in cut]
            self.todo.insert(1, ev.EvaluationCut(cut[0].version))
        self.loaded.pop(engine, None)
        self.closed.pop(engine, None)

    def running(self, engine: str) -> bool:
        return any(isinstance(each, Work) and each.engine == engine for each in self.todo)

    def take(self, index: int) -> None:
        """One of the things that are due happens."""
        event = self.todo.pop(index)
        match event:
            case Work(engine, request):
                if self.closed.get(engine) is ev.Rollover.KEEP:
                    self.todo.append(event)
                    return
                event = self.segment(engine, request, FinishReason.STOP)
            case ev.EnginePaused(engine):
                if self.running(engine) and self.closed[engine] is ev.Rollover.DRAIN:
                    self.todo.append(event)
                    return
            case ev.EngineDown(engine):  # what was said to it meanwhile has no answer
                self.todo = [each for each in self.todo if getattr(each, "engine", None) != engine]
            case ev.EngineUp(engine):
                self.dead.discard(engine)
                self.up.add(engine)
            case ev.EngineLoaded(engine, version):
                self.loaded[engine] = version.step
                self.loading.discard(engine)
            case ev.BatchTrained(version):
                (half,) = self.busy
                self.busy.discard(half)
                self.versions[half] = version.step
            case ev.Published(version):
                self.busy.discard(PUBLISHING)
                self.todo.append(ev.Delivered(version))
            case ev.Proved() if any(isinstance(each, Work) for each in self.todo):  # what runs is finished first
                self.todo.append(event)
                return
            case ev.Evaluated() | ev.EvaluationCut():
                self.evaluating.clear()
            case ev.Proved() | ev.Checkpointed() | ev.HandedOver():
                self.busy.clear()
                self.proving = False
        if isinstance(event, ev.SegmentArrived):
            self.writers.setdefault(event.segment.request.group, set()).add(event.segment.version.step)
        instructions = self.conductor.step(event, 0.0)
        if isinstance(event, ev.EngineDown) and ev.Restart(event.engine) not in instructions:
            self.doomed.add(event.engine)
        for instruction in instructions:
            self.said.append(instruction)
            answers = self.answer(instruction)  # which may take from what is due
            self.todo += answers

    def segment(self, engine: str, request: Request, finish: FinishReason) -> ev.SegmentArrived:
        version = WeightVersion(self.loaded[engine])
        return ev.SegmentArrived(engine, Segment(request.id, (5,), (-1.0,), version, version, finish), "x")

    def cut(self, engine: str, request: RequestId | None = None) -> list[ev.Event | Work]:
        """What this engine says of the requests it holds, or of one of them, when they are cut."""
        held = [each for each in self.todo if isinstance(each, Work) and each.engine == engine]
        cut = [each for each in held if request in (None, each.request.id)]
        self.todo = [each for each in self.todo if each not in cut]
        return [self.segment(engine, each.request, FinishReason.ABORT) for each in cut]

    def own(self, half: str | None) -> None:
        """A trainer does one thing at a time."""
        assert not self.busy, f"the trainer is busy: {self.said[-6:]}"
        self.busy.add(half)

    def answer(self, instruction: ev.Instruction) -> list[ev.Event | Work]:
        if isinstance(instruction, ev.Retire):
            self.retire(instruction)
        if getattr(instruction, "engine", None) in self.dead and not isinstance(instruction, ev.Restart):
            return []  # the news of it is under way
        return self.trainer(instruction) or self.engine(instruction)

    def retire(self, instruction: ev.Retire) -> None:
        """Once, and while it is used for nothing."""
        engine = instruction.engine
        assert engine not in self.gone and not self.proving and engine not in self.evaluating
        assert engine in (self.doomed if instruction.lost else self.leaving)
        assert not self.running(engine) and engine not in self.closed and (instruction.lost <= (engine not in self.up))
        self.leaving.discard(engine)
        self.up.discard(engine)
        self.loaded.pop(engine, None)
        self.gone.add(engine)

    def fault(self, engine: str, version: WeightVersion) -> ev.SyncFailed | None:
        """Now and then a part of bringing a version to an engine fails."""
        if self.faults and self.random.randrange(2):
            self.faults -= 1
            return ev.SyncFailed(version, "no room", engine)
        return None

    def trainer(self, instruction: ev.Instruction) -> list[ev.Event | Work]:
        match instruction:
            case ev.Train(step, groups, half):
                assert step == self.version == self.versions[half]
                self.own(half)
                self.batches.append([group.id for group in groups])
                return [ev.BatchTrained(WeightVersion(step + 1))]
            case ev.HandOver(version, source, target):
                assert version.step == self.version == self.versions[source] and target in self.asleep and source != target
                self.own(target)
                self.versions[target] = version.step
                return [ev.HandedOver(version)]
            case ev.Publish(version, engines):
                if version != self.offered[0]:  # else the same bytes go out again, whatever the trainer does
                    assert version.step == self.version
                    self.own(PUBLISHING)
                self.offered = version, tuple(sorted(self.up.intersection(engines or self.up)))
                return [ev.Published(*self.offered)]
            case ev.Prove(version):
                assert version.step == self.version and set(self.loaded) == self.up and not self.closed
                self.own(None)
                self.proving = True
                return [ev.Proved(version)]
            case ev.Checkpoint(version):
                assert version.step == self.version
                self.own(None)
                return [ev.Checkpointed(version)]
        return []

    def engine(self, instruction: ev.Instruction) -> list[ev.Event | Work]:
        match instruction:
            case ev.FetchPrompts(count):
                ids = range(self.cursor, min(self.cursor + count, self.prompts))
                self.cursor = ids.stop
                found = tuple(Prompt(i, i, (1, 2), f"p{i}") for i in ids)
                return [ev.PromptsOffered(found, self.cursor == self.prompts)]
            case ev.Generate(engine, request):
                assert engine in self.loaded and engine not in self.asleep and engine not in self.closed
                assert engine not in self.leaving and not self.proving
                return [Work(engine, request)]
            case ev.Restart(engine):
                assert engine not in self.leaving
                if self.deaths and self.random.randrange(2):
                    self.deaths -= 1
                    return [ev.EngineDown(engine, "killed as it started")]
                return [ev.EngineUp(engine, 3, None)]
            case Play(prompt, member):
                return [Asked(prompt.id, member, Asking(prompt.token_ids, 4))]
            case Tell(group, member, reply):
                again = Asking((1, 2, *reply.token_ids, 9), 4)
                return [Asked(group, member, again) if self.random.randrange(2) else EpisodeEnded(group, member, None, "x")]
            case ev.Score(prompt, completion):
                value = None if prompt.id in self.broken else 0.5 if prompt.id in self.flat else float(completion.member)
                return [ev.Scored(prompt.id, completion.member, Reward(value))]
            case ev.Sleep(engine):
                assert engine not in self.evaluating
                self.asleep.add(engine)
                return [*self.cut(engine), ev.EngineSlept(engine)]
            case ev.Wake(engine, part):
                if part is ev.WakePart.WEIGHTS:
                    self.loading.add(engine)
                else:
                    assert engine not in self.loading, "the cache wakes after the load"
                    self.asleep.discard(engine)
                return [ev.EngineWoke(engine, part)]
            case ev.Prepare(engine, version):
                assert version == self.offered[0] and engine in self.offered[1], "it was never offered that"
                return [self.fault(engine, version) or ev.EnginePrepared(engine, version)]
            case ev.Pause(engine, rollover):
                self.closed[engine] = rollover
                cut = self.cut(engine) if rollover is ev.Rollover.ABORT else []
                return [*cut, ev.EnginePaused(engine)]
            case ev.Move(engine, request):
                return self.cut(engine, request)
            case ev.Abort(engine, requests):
                return [each for request in requests for each in self.cut(engine, request)]
            case ev.Load(engine, version):
                assert engine in self.closed or engine in self.asleep
                return [self.fault(engine, version) or ev.EngineLoaded(engine, version)]
            case ev.Resume(engine):
                self.closed.pop(engine, None)
                return [ev.EngineResumed(engine)]
            case ev.Evaluate(version, engines):
                if not self.loaded:
                    return [ev.EvaluationCut(version)]
                assert {self.loaded[engine] for engine in engines or self.loaded} == {version.step}
                assert not self.asleep.intersection(engines)
                self.evaluating = set(engines or self.loaded)
                return [ev.Evaluated(version)]
        return []


def conductor(
    steps: int = 3,
    engines: int = 1,
    batch: int = 2,
    evaluate: bool = True,
    every: int = 0,
    save: int = 0,
    placement: str = "colocated",
    limit: int = 0,
    rollover: ev.Rollover = ev.Rollover.DRAIN,
    prove: bool = False,
    restarts: int = 0,
    retries: int = 0,
    spare: int = 0,
    moves: int = 0,
    refills: int = 0,
    turns: int = 0,
) -> Conductor:
    policy = RolloutPolicy(
        group_size=2,
        groups_per_batch=batch,
        batches=steps,
        sampling=Sampling(4),
        window=50,
        max_staleness=limit,
        exact=placement == "swap",
        oversample=spare,
        order="longest" if moves else "admission",
        moves=moves,
        filter="flat" if refills else "none",
        refills=refills,
        turns=turns,
    )
    schedule = Schedule(steps, engines, evaluate, every, save, prove, restarts)
    return Conductor(policy, schedule, rollover, WeightVersion(0), placement, retries)


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


@settings(max_examples=200, deadline=None)
@given(
    placement=st.sampled_from(("separate", "async")),
    engines=st.integers(1, 3),
    deaths=st.integers(0, 4),
    restarts=st.integers(0, 2),
    faults=st.integers(0, 3),
    evaluate=st.booleans(),
    limit=st.integers(0, 2),
    rollover=st.sampled_from(list(ev.Rollover)),
    seed=st.integers(0, 2**32),
)
def test_engines_that_are_lost_come_back_as_often_as_is_allowed(
    placement, engines, deaths, restarts, faults, evaluate, limit, rollover, seed
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
    world = Answers(run, engines, 100, seed, deaths=deaths, faults=faults)
    world.run()
    end = world.said[-1]
    assert isinstance(end, ev.Finish) and sum(isinstance(i, ev.Finish) for i in world.said) == 1
    counts = world.conductor.counts
    assert counts.admitted == counts.trained + sum(counts.dropped.values())
    again = Counter(i.engine for i in world.said if isinstance(i, ev.Restart))
    assert all(times <= restarts for times in again.values())
    assert all(again[engine] == restarts for engine in world.gone), "it might have been started again"
    assert end.failed or world.gone == world.doomed
    if end.failed:  # all are lost for good, or a member was lost with more engines than it may be tried on
        assert "no engine is left: killed" in end.cause
        assert all(again[f"e{i}"] == restarts for i in range(engines))
    else:
        assert world.version == 4


class Gone(Answers):
    """What is lost does not come back: no node has room for it."""

    def engine(self, instruction: ev.Instruction) -> list[ev.Event | Work]:
        return [] if isinstance(instruction, ev.Restart) else super().engine(instruction)


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
