"""Carries out what the conductor of a simulated run says, and tells it what came of that: a run's ring, without stations.

Whatever happens is put into one pile, and the conductor takes it from there as in a run (`driver.News`): one event after the
other, news of rollouts together. What the conductor says is begun in its order. A real run's shells do the same, with
calls that wait for somebody; here each of them takes as long as a model says (`Takes`, `links.Links`, `engines.Model`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapreplace
from math import nan
from typing import Any, Protocol

from rollyard import events as ev
from rollyard import worker
from rollyard.conductor import Conductor
from rollyard.config import Config
from rollyard.driver import NEWS, News
from rollyard.evaluate import Evaluator
from rollyard.fitness import Condemn
from rollyard.plan.clock import Clock
from rollyard.plan.coming import NONE, Coming, Failures
from rollyard.plan.cores import DRIVER, IDLE, Cores, Line, Machine, Paced
from rollyard.plan.engines import Engines, Make, Model
from rollyard.plan.evaluation import Evaluations
from rollyard.plan.links import Links, Sync
from rollyard.protocols.rollouts import PromptSource
from rollyard.types import Activity, Completion, Group, Prompt, Request, Reward, Segment, TrainStats, WeightVersion
from rollyard.watch.accounts import ENGINE, TRAINER
from rollyard.watch.recorder import Recorder
from rollyard.watch.spans import SpanLog
from rollyard.watch.step import Step
from rollyard.watch.timeline import Phase, Timeline

Heard = Callable[[float, Sequence[ev.Event], Sequence[ev.Instruction]], None]
TRAINERS = "trainer"  # all of them, which are busy at the same time


def unlearnt(step: int, tokens: int) -> TrainStats:
    """Of a step in which nothing is learnt: what it would come to is not known, and its metrics say so."""
    return TrainStats(step, nan, nan, nan, tokens, nan, nan, nan, nan, nan, nan, nan, nan, nan)


class Takes(Links, Protocol):
    """Seconds that everything takes but what engines write."""

    def train_s(self, groups: Sequence[Group]) -> float: ...

    def score_s(self, completion: Completion) -> float: ...

    @property
    def handoff_s(self) -> float:
        """The training state goes from one half to the other."""
        ...

    @property
    def checkpoint_s(self) -> float: ...

    def start_s(self, engine: ev.EngineId) -> float:
        """Until an engine that was lost, or is new, is up."""
        ...


@dataclass(frozen=True, slots=True)
class Stations:
    """What stands for the stations of a run.

    Args:
        engines: that there are at the start.
        make: a new engine.
        judge: the verdict on a completion.
        workers: judgements at a time.
        window: tokens of prompt and completion at most.
        learnt: told the step of each version, before anybody else hears of it.
        trainers: devices that train, which do the same at the same times.
        failures: of nodes that have engines.
        machine: what the driver works on.
        held_out: prompts that are evaluated with.
        judged: verdicts say something.
    """

    engines: int
    make: Make
    takes: Takes
    source: PromptSource
    judge: Callable[[Completion], Reward]
    workers: int
    window: int
    learnt: Callable[[int], None] = lambda step: None
    trainers: int = 1
    failures: Failures = NONE
    machine: Machine = IDLE
    held_out: tuple[Prompt, ...] = ()
    judged: bool = False


class World:
    """One simulated run.

    Args:
        heard: told each step of the conductor: the time, what it was told, and what it said.
        stepped: told each training step.
    """

    def __init__(
        self,
        config: Config,
        conductor: Conductor,
        clock: Clock,
        recorder: Recorder,
        timeline: Timeline,
        stations: Stations,
        heard: Heard | None = None,
        stepped: Callable[[Step], None] | None = None,
    ) -> None:
        self._config, self.conductor, self._clock, self._recorder, self._timeline = config, conductor, clock, recorder, timeline
        self._stations, self._takes, self._source, self._judge = stations, stations.takes, stations.source, stations.judge
        self._heard, self._stepped = heard, stepped
        self._machine = machine = stations.machine
        self._cores = Cores(clock, machine.cores)
        self._paced: dict[ev.EngineId, Paced] = {}
        self._lines: dict[ev.EngineId | None, Line] = {}  # who trains
        self._news = News()
        self._waiting = False  # for news
        self.events = 0  # that the conductor was told
        self._learned: ev.EngineId | None = None  # the half that trained last
        self._trained: tuple[tuple[Group, ...], TrainStats] | None = None
        self._requests: dict[ev.EngineId, list[Request]] = defaultdict(list)  # that one step hands out
        self._unjudged: list[ev.Score] = []
        self._judging = False  # somebody is about to look at them
        self._judges = [0.0] * stations.workers  # a heap: when each is free
        self._slots = config.engine.slots
        self.engines = Engines(
            clock, timeline, self._make if machine.cores else stations.make, self.post, self._hear_private, self._gone
        )
        self._trainer, self._halves = SpanLog(lambda: clock.nanoseconds), dict[ev.EngineId | None, SpanLog]()
        for name in (f"engine-{number}" for number in range(stations.engines)):
            self._watch(name, self.engines.start(name, SpanLog(lambda: clock.nanoseconds)).spans)
        if config.place.apart:
            recorder.accounts.watch(TRAINERS, TRAINER, self._trainer, stations.trainers)
        self._sync = Sync(clock, self.engines, self._takes, self._trainer, config.weights, self.post, timeline, recorder)
        self.coming = Coming(self, clock, stations.failures)
        rollout, seed = worker.sampling_of(config), config.run.seed
        evaluator = Evaluator(stations.held_out, rollout, stations.window, config.eval.samples, seed)
        self._evaluations = Evaluations(clock, self.engines, evaluator, self._judge_aside, self.post, timeline, recorder)
        self._at_once, self._actions = self._rollouts(), self._others()

    def _rollouts(self) -> Mapping[type[ev.Instruction], Callable[[Any], None]]:
        """What is begun as it is said."""
        return {
            ev.Generate: self._generate,
            ev.Score: lambda told: self._unjudged.append(told),
            ev.FetchPrompts: self._fetch,
            ev.Abort: self._abort,
            ev.Move: self._move,
            Condemn: lambda told: self.engines.lose(told.engine, told.cause),
            ev.Finish: self._finish,
        }

    def _others(self) -> Mapping[type[ev.Instruction], Callable[[Any], None]]:
        """What is begun after that."""
        return {
            ev.Train: self._train,
            ev.HandOver: self._hand_over,
            ev.Restart: self._restart,
            ev.Checkpoint: self._checkpoint,
            ev.Retire: self._retire,
            ev.Evaluate: self._evaluations.begin,
            **self._sync.actions,
        }

    def _watch(self, name: ev.EngineId, spans: SpanLog) -> None:
        """An engine that shares its device with a trainer is accounted for with it."""
        self._recorder.accounts.watch(name, ENGINE, spans, self._config.engine.tensor_parallel_size)
        if not self._config.place.apart:
            self._recorder.accounts.watch(f"{TRAINERS} of {name}", TRAINER, spans)
            self._halves[name] = spans

    def run(self) -> None:
        """To its end. Raises AssertionError when that does not come."""
        for seat in self.engines:
            self._happen((ev.EngineUp(seat.name, self._slots, seat.model.version),))
            self.coming.came(seat.name)
        self._clock.soon(self._turn)
        self._clock.run(self._settle)

    def _settle(self) -> None:
        if self._machine.cores:
            self._cores.settle()
        self.engines.settle()

    # -------------------------------------------------------------------------------------------- processors

    def _make(self, name: ev.EngineId, spans: SpanLog) -> Model:
        """A new engine that shares the processors."""

        def alive() -> bool:
            return name in self.engines and self.engines[name].model is paced and not self.engines[name].lost

        if name in self._paced:
            self._cores.leave(self._paced[name])
        make, touch = partial(self._stations.make, name), partial(self._touch, name)
        paced = self._paced[name] = Paced(make, spans, self._clock, self._process(name), alive, touch)
        self._cores.join(paced)
        return paced

    def _touch(self, name: ev.EngineId) -> None:
        self.engines.touch(name)

    def _process(self, engine: ev.EngineId | None) -> str:
        """Of an engine, of the half that trains, or of a trainer that has devices of its own (None)."""
        place, here = self._config.place, worker.trains_here(self._config)
        if here and (engine is None or place.placement == "colocated"):
            return DRIVER
        return engine or TRAINERS

    def _line(self, half: ev.EngineId | None) -> Line:
        """The thread that trains."""
        if half not in self._lines:
            self._lines[half] = Line(self._cores, self._process(half))
        return self._lines[half]

    # ------------------------------------------------------------------------------------------ the circle

    def post(self, event: ev.Event) -> None:
        """Something happened."""
        self._news.put_nowait(event)
        if self._waiting:
            self._waiting = False
            self._clock.soon(self._turn)

    def _turn(self) -> None:
        if not self._news:
            self._waiting = True
            return
        events = self._news.next()
        event = events[0]
        if type(event) in NEWS:
            self._happen(events)
        else:
            for each in self.coming.turns(event):
                self._happen((each,))
            if isinstance(event, ev.BatchTrained):
                self._book(event.version)
        if self._machine.message_s:
            ended = sum(type(each) is ev.SegmentArrived and each.segment.finish is not None for each in events)
            self._cores.driver.work(ended * self._machine.message_s, self._turn)
        elif self._news or self._clock.due:
            self._clock.soon(self._turn)
        else:
            self._waiting = True  # as it would be found in the next turn

    def _happen(self, events: Sequence[ev.Event]) -> None:
        """What happened at once, as one step."""
        self.events += len(events)
        if (now_ns := self._clock.nanoseconds) >= self._recorder.accounts.slots.due_ns:
            self._recorder.accounts.slots.note(now_ns, self.conductor.slots)  # since the last time
        instructions = self.conductor.steps(events, self._clock.now)
        self._recorder.record((*events, *instructions))
        if self._heard is not None:
            self._heard(self._clock.now, events, instructions)
        self._carry_out(instructions)

    def _book(self, version: WeightVersion) -> None:
        if self._trained is None:
            return
        groups, stats = self._trained
        self._trained = None
        step = self._recorder.step(version, groups, stats, self.conductor.counts.dropped)
        self.engines.note(self._clock.now)
        self._recorder.accounts.collect()
        self.coming.trained(version.step)
        if self._stepped is not None:
            self._stepped(step)

    def _carry_out(self, instructions: Sequence[ev.Instruction]) -> None:
        """Begin it, in the order of a run: what rollouts need, requests, and then what each other station is to do."""
        later: list[Callable[[], None]] = []
        for told in instructions:
            if (at_once := self._at_once.get(type(told))) is not None:
                at_once(told)
            elif (action := self._actions.get(type(told))) is not None:
                later.append(partial(action, told))
        if self._unjudged and not self._judging:
            self._judging = True
            self._clock.soon(self._score)
        for engine, requests in self._requests.items():
            self._hand_out(engine, requests)
        self._requests.clear()
        for call in later:
            self._clock.soon(call)

    def _hand_out(self, engine: ev.EngineId, requests: Sequence[Request]) -> None:
        if not self._machine.request_s:
            self.engines.generate(engine, requests)
            return
        self._timeline.open(Phase.GENERATE)  # it is part of it

        def handed() -> None:
            self._timeline.close(Phase.GENERATE)
            self.engines.generate(engine, requests)

        self._cores.driver.work(len(requests) * self._machine.request_s, handed)

    def _generate(self, told: ev.Generate) -> None:
        self._requests[told.engine].append(told.request)

    def _fetch(self, told: ev.FetchPrompts) -> None:
        self.post(ev.PromptsOffered(*self._source.take(told.count)))

    def _abort(self, told: ev.Abort) -> None:
        self._clock.soon(partial(self.engines.abort, told.engine, told.requests))

    def _move(self, told: ev.Move) -> None:
        self._clock.soon(partial(self.engines.abort, told.engine, (told.request,)))

    def _finish(self, _: ev.Finish) -> None:
        self._clock.stopped = True

    # ------------------------------------------------------------------------------------------- scoring

    def _score(self) -> None:
        """Judgements begin in the order asked. Once one takes time, each of the others waits its turn."""
        asked, self._unjudged, self._judging = self._unjudged, [], False
        waits = False
        for told in asked:
            done = told.completion
            seconds = self._takes.score_s(done)
            if not seconds:
                self.post(ev.Scored(done.group, done.member, self._judge(done)))
                continue
            self._timeline.open(Phase.SCORE)
            if waits:
                self._clock.soon(partial(self._begin_judging, done, seconds))
            else:
                self._begin_judging(done, seconds)
            waits = True

    def _begin_judging(self, done: Completion, seconds: float) -> None:
        self._clock.at(self._free(seconds), partial(self._scored, done))

    def _scored(self, done: Completion) -> None:
        self._timeline.close(Phase.SCORE)
        self.post(ev.Scored(done.group, done.member, self._judge(done)))

    def _free(self, seconds: float) -> float:
        """When a judgement of so many seconds ends: it begins as soon as somebody is free."""
        end = max(self._judges[0], self._clock.now) + seconds
        heapreplace(self._judges, end)
        return end

    def _judge_aside(self, done: Completion, then: Callable[[Reward], None]) -> None:
        """A completion of a held-out prompt."""
        if seconds := self._takes.score_s(done):
            self._clock.at(self._free(seconds), lambda: then(self._judge(done)))
        else:
            then(self._judge(done))

    # ------------------------------------------------------------------------------------------ training

    def _unmasked(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        """What is trained on of a batch (`advantage.compare`)."""
        if self._config.advantage.overlong != "mask":
            return groups
        rows = (tuple(done for done in group.rollouts if not done.completion.finish.truncated) for group in groups)
        return tuple(replace(group, rollouts=left) for group, left in zip(groups, rows, strict=True))

    def _train(self, told: ev.Train) -> None:
        batch = self._unmasked(told.groups)
        begin, seconds = self._clock.nanoseconds, self._takes.train_s(batch)
        self._timeline.open(Phase.TRAIN)

        def ready() -> None:
            nonlocal begin
            begin = self._clock.nanoseconds
            self._line(told.half).work(seconds, partial(self._clock.soon, trained))

        def trained() -> None:
            self._timeline.close(Phase.TRAIN)
            for spans in self._training(told.half):
                spans.add(Activity.TRAIN, begin, self._clock.nanoseconds, "step")
            tokens = sum(len(done.completion.token_ids) for group in batch for done in group.rollouts)
            version = WeightVersion(told.step + 1)
            self._trained = told.groups, unlearnt(version.step, tokens)
            self._learned = told.half
            self._stations.learnt(version.step)
            self.post(ev.BatchTrained(version))

        if self._machine.batch_s:
            self._cores.driver.work(self._machine.batch_s, ready)
        else:
            self._clock.soon(ready)

    def _training(self, half: ev.EngineId | None) -> Sequence[SpanLog]:
        """Of the devices that train."""
        if half is not None:
            return (self._halves[half],)
        return tuple(self._halves.values()) or (self._trainer,)

    def _hand_over(self, told: ev.HandOver) -> None:
        begin = self._clock.nanoseconds
        self._timeline.open(Phase.SYNC)

        def handed() -> None:
            self._timeline.close(Phase.SYNC)
            for half in (told.source, told.target):
                self._halves[half].add(Activity.SYNC, begin, self._clock.nanoseconds, "handoff")
            self.post(ev.HandedOver(told.version))

        self._clock.after(self._takes.handoff_s, handed)

    def _checkpoint(self, told: ev.Checkpoint) -> None:
        begin = self._clock.nanoseconds
        self._timeline.open(Phase.CHECKPOINT)

        def saved() -> None:
            self._timeline.close(Phase.CHECKPOINT)
            for spans in self._training(self._learned):
                spans.add(Activity.CHECKPOINT, begin, self._clock.nanoseconds)
            self.post(ev.Checkpointed(told.version))

        self._clock.after(self._takes.checkpoint_s, saved)

    # ------------------------------------------------------------------------------- engines that come and go

    def lose(self, engine: ev.EngineId, cause: str) -> None:
        """It is gone from now on, if it is still there."""
        if engine in self.engines:
            self.engines.lose(engine, cause)

    def add(self, engine: ev.EngineId) -> None:
        """Begin to start a new one."""
        self._start(engine)

    def _restart(self, told: ev.Restart) -> None:
        self._start(told.engine)

    def _start(self, engine: ev.EngineId) -> None:
        begin = self._clock.nanoseconds

        def up() -> None:
            self._timeline.spans.add(Activity.RESTART, begin, self._clock.nanoseconds, engine)
            seat = self.engines.start(engine, SpanLog(lambda: self._clock.nanoseconds))
            self._sync.join(engine)
            self.coming.came(engine)
            self._watch(engine, seat.spans)
            self.post(ev.EngineUp(engine, self._slots, None))

        self._clock.after(self._takes.start_s(engine), up)

    def _retire(self, told: ev.Retire) -> None:
        self._sync.leave(told.engine)
        self.engines.close(told.engine)
        self._recorder.accounts.left(told.engine)
        self.coming.left(told.engine)

    def _gone(self, engine: ev.EngineId) -> None:
        """Nobody has heard of it yet."""
        self._evaluations.gone(engine)

    def _hear_private(self, engine: ev.EngineId, segment: Segment) -> None:
        """Of a request outside the rollouts."""
        self._evaluations.hear(engine, segment)
