"""The simplest world for a conductor, which does what it says in a random order and holds everybody to the rules."""

from __future__ import annotations

import random
from dataclasses import dataclass

from rollyard import events as ev
from rollyard.conductor import Conductor
from rollyard.fitness import Condemn, EngineProbed, EngineUnfit, Probe
from rollyard.place.mode import Schedule
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.state import Counts
from rollyard.turns import Asked, EpisodeEnded, Play, Tell
from rollyard.types import Asking, FinishReason, Prompt, Request, RequestId, Reward, Sampling, Segment, Verdict, WeightVersion

PUBLISHING = "publishing"
FIRST = WeightVersion(0)


@dataclass(frozen=True)
class Work:
    """A request that an engine holds."""

    engine: str
    request: Request
    written: int = 0  # tokens that it was told of


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
        done: frozenset[int] = frozenset(),
        version: WeightVersion = FIRST,
        life: int = 0,
        unfit: int = 0,
        doubts: int = 0,
    ):
        self.life, self.names = life, {version.step: version}
        self.slow = False  # an answer comes piece by piece
        self.source = [id_ for id_ in range(prompts) if id_ not in done]
        self.unfit, self.doubts = unfit, doubts  # engines that will stand still, and decode with other weights than they say
        self.flat = flat  # prompts whose verdicts are all equal
        self.joins, self.leaves = joins, leaves  # engines that will come, and go
        self.leaving: set[str] = set()
        self.gone: set[str] = set()  # they were retired
        self.doomed: set[str] = set()  # lost, and not started again
        self.proving = False
        self.faults = faults
        self.deaths = deaths  # engines that will be lost, some of them while they start again
        self.conductor, self.random, self.broken = conductor, random.Random(seed), broken
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
        halves = (f"e{i}" for i in range(engines))
        self.versions: dict[str | None, int] = dict.fromkeys((None, *halves), version.step)  # of the trainer, or of halves
        self.busy: set[str | None] = set()  # trainers whose parameters must not be touched
        self.batches: list[list[int]] = []
        self.writers: dict[int, set[int]] = {}  # versions that wrote, by group

    @property
    def version(self) -> int:
        return max(self.versions.values())

    @property
    def over(self) -> bool:
        return not self.todo or any(isinstance(i, ev.Finish) for i in self.said)

    def run(self, events: int = 50_000) -> None:
        """Until the end, or as long as there are events; without an end the default is too many."""
        for _ in range(events):
            if self.over:
                return
            if self.joins and not self.random.randrange(15):
                self.joins -= 1
                self.todo.append(ev.EngineUp(f"j{self.joins}", 3, None))
            if self.leaves and len(self.conductor.staying) > 1 and not self.random.randrange(15):
                self.leave(self.random.choice(sorted(self.conductor.staying)), self.random.random() < 0.5)
            if self.unfit and self.loaded and self.up and not self.random.randrange(20):
                self.unfit -= 1
                self.todo.insert(0, EngineUnfit(self.random.choice(sorted(self.up)), "it stood still"))
                self.take(0)
            if self.deaths and self.loaded and not self.random.randrange(20):
                self.kill(self.random.choice(sorted(self.loaded)))
            self.take(self.random.randrange(len(self.todo)))
        assert events < 50_000, "no end in sight"

    def leave(self, engine: str, cut: bool) -> None:
        """It is told to go."""
        self.leaves -= 1
        self.leaving.add(engine)
        self.todo.insert(0, ev.EngineLeaving(engine, cut))
        self.take(0)

    def kill(self, engine: str) -> None:
        """It is gone, and what it had not said with it."""
        self.deaths -= 1
        self.die(engine, "killed")

    def die(self, engine: str, cause: str) -> None:
        self.dead.add(engine)
        self.up.discard(engine)
        self.todo = [each for each in self.todo if getattr(each, "engine", None) != engine]
        self.todo.insert(0, ev.EngineDown(engine, cause))
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
                more = self.slow and request.sampling.max_tokens - event.written > 1 and self.random.randrange(2)
                if more:
                    self.todo.append(Work(engine, request, event.written + 1))
                event = self.segment(engine, request, None if more else FinishReason.STOP)
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
                self.names[version.step] = version
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
        self.happens(event)
        instructions = self.conductor.step(event, 0.0)
        self.noted(event, instructions)
        if isinstance(event, ev.EngineDown) and ev.Restart(event.engine) not in instructions:
            self.doomed.add(event.engine)
        for instruction in instructions:
            self.said.append(instruction)
            answers = self.answer(instruction)  # which may take from what is due
            self.todo += answers

    def happens(self, event: ev.Event) -> None:
        """The conductor is about to hear this."""

    def noted(self, event: ev.Event, said: list[ev.Instruction]) -> None:
        """It has said this."""

    def segment(self, engine: str, request: Request, finish: FinishReason | None) -> ev.SegmentArrived:
        version = self.names[self.loaded[engine]]
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
        if isinstance(instruction, Condemn):
            assert instruction.engine in self.up
            self.die(instruction.engine, instruction.cause)
        if getattr(instruction, "engine", None) in self.dead and not isinstance(instruction, ev.Restart):
            return []  # the news of it is under way
        return self.trainer(instruction) or self.rollouts(instruction) or self.weights(instruction)

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
                return [ev.BatchTrained(WeightVersion(step + 1, self.life))]
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

    def rollouts(self, instruction: ev.Instruction) -> list[ev.Event | Work]:
        """What engines, environments and judges say of prompts."""
        match instruction:
            case ev.FetchPrompts(count):
                found = tuple(Prompt(i, i, (1, 2), f"p{i}") for i in self.source[self.cursor : self.cursor + count])
                self.cursor += len(found)
                return [ev.PromptsOffered(found, self.cursor == len(self.source))]
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
            case ev.Move(engine, request):
                return self.cut(engine, request)
            case ev.Abort(engine, requests):
                return [each for request in requests for each in self.cut(engine, request)]
            case ev.Evaluate(version, engines):
                if not self.loaded:
                    return [ev.EvaluationCut(version)]
                assert {self.loaded[engine] for engine in engines or self.loaded} == {version.step}
                assert not self.asleep.intersection(engines)
                self.evaluating = set(engines or self.loaded)
                return [ev.Evaluated(version)]
        return []

    def weights(self, instruction: ev.Instruction) -> list[ev.Event | Work]:
        """What engines say of new weights, and of making room for the trainer."""
        match instruction:
            case Probe(engine):
                if engine not in self.loaded or engine in self.closed:
                    return []  # it is being changed: it says nothing
                self.doubts -= (wrong := self.doubts > 0 and not self.random.randrange(3))
                return [EngineProbed(engine, Verdict.CONTRADICTED if wrong else Verdict.VERIFIED, "it has other weights")]
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
            case ev.Load(engine, version):
                assert engine in self.closed or engine in self.asleep
                return [self.fault(engine, version) or ev.EngineLoaded(engine, version)]
            case ev.Resume(engine):
                self.closed.pop(engine, None)
                return [ev.EngineResumed(engine)]
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
    version: WeightVersion = FIRST,
    counts: Counts | None = None,
    probes: int = 0,
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
    schedule = Schedule(steps, engines, evaluate, every, save, prove, restarts, probes)
    return Conductor(policy, schedule, rollover, version, placement, retries, counts)


def names(world: Answers, *kinds: type) -> list[str]:
    return [type(i).__name__ for i in world.said if isinstance(i, kinds)]
