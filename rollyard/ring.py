"""The loop: the ring of stations with the conductor in their midst.

      prompts ──> rollout ──> reward ──> advantage ──> batch ──> train
         ^          │  ^                                           │
         │          v  │ segments                                  v
         │         engine <─────────────── weights <────────── new version
         │
         └── admission, as the staleness limit allows

    station    consumes        waits for                         unblocked by            produces
    prompts    FetchPrompts    room under the staleness limit    batch taken or trained  PromptsOffered
    engine     Generate        a free slot, an allowed version   finish, EngineLoaded    SegmentArrived
    reward     Score           nothing                           -                       Scored
    train      Train           B ready groups, engines asleep    Scored, EngineSlept     BatchTrained
    weights    Publish, Load   the optimizer step                BatchTrained            Published, EngineLoaded
                               (Prepare: nothing, beside generation)
    evaluate   Evaluate        every engine at the version       EngineResumed           Evaluated

Everything that happens comes back as an event in one inbox; the conductor answers with instructions; the loop starts
them and decides nothing. An exception in any of them ends the run, with the report so far.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollyard import events as ev
from rollyard import worker
from rollyard.builder import Builder
from rollyard.caller import Caller
from rollyard.chaos.injector import Injector
from rollyard.checkpoints import At, Checkpoints
from rollyard.conducting import conductor_of
from rollyard.conductor import Conductor
from rollyard.config import Config
from rollyard.control import LOOK, Answer, Order
from rollyard.driver import Inbox, collecting_seldom, warned
from rollyard.environment import cache_folder
from rollyard.episode.shell import Episodes
from rollyard.errors import ConfigError, EngineError, EngineLost, JournalError, RollyardError, TimeLimitExceeded, TrainError
from rollyard.evaluate import Evaluator
from rollyard.exchange.agreed import agreed
from rollyard.exchange.generation import Generation
from rollyard.exchange.waiting import GivenUp
from rollyard.fleet import Fleet
from rollyard.journal.folder import RunFolder
from rollyard.journal.recover import Past
from rollyard.learner import TrainerLearner
from rollyard.model.architecture import Architecture
from rollyard.place.inline import DeviceThread
from rollyard.protocols.rollouts import Engine, Environment
from rollyard.protocols.training import Learner
from rollyard.resume import NOTHING, check_files, given_directly, remember
from rollyard.reward.open import Given
from rollyard.rollout.controller import Controller
from rollyard.rollout.state import Counts as CoreCounts
from rollyard.stations import Nodes, Stations
from rollyard.types import Activity, DropReason, EngineStats, Group, TrainStats, WeightVersion
from rollyard.warmup import base_policy
from rollyard.watch.accounts import ENGINE
from rollyard.watch.live import Glance
from rollyard.watch.recorder import Recorder
from rollyard.watch.report import Counts, Filtering, Report, TokenLedger
from rollyard.watch.step import Step
from rollyard.watch.timeline import Phase, Timeline
from rollyard.weights.remote import hand_over

REFRESH_S = 0.2  # seconds between two pictures of the run
STARTING = Answer(problem="the run is still starting", where="engine", remedy="wait until it generates")


class Stopped(Exception):
    """The run was stopped before its first step."""


class Ring:
    """The stations of one run, and the conductor in their midst."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        timeline: Timeline,
        recorder: Recorder,
        inbox: Inbox,
        past: Past,
        at: At | None = None,
        injector: Injector | None = None,
        caller: Caller | None = None,
    ) -> None:
        self._config, self._earlier, self._caller = config, past, caller
        self._folder, self._timeline, self._recorder = folder, timeline, recorder
        self._slots, self._inbox, self._injector = recorder.accounts.slots, inbox, injector
        self._device = DeviceThread()
        self._checkpoints = Checkpoints(folder, recorder, config.checkpoint.keep, past.lives, at)
        self._activity = "starting"
        self._tasks = set[asyncio.Task[None]]()
        self._exchange: Generation | None = None
        self._built = AsyncExitStack()  # closes what was built so far, the last first
        self._built.push_async_callback(self._leave)  # when nothing is at work any more
        self._built.callback(self._device.close)
        self._built.enter_context(collecting_seldom())
        self.conductor: Conductor | None = None
        self.nodes: Nodes = dict
        self._trained: tuple[tuple[Group, ...], TrainStats] | None = None
        self._saved: WeightVersion | None = None
        self._booked: WeightVersion | None = None  # the last one that the conductor knows to be trained
        self._training: asyncio.Task[None] | None = None
        self._past: list[EngineStats] = []  # of engines that were lost
        self._episodes: Episodes | None = None
        self._learned: ev.EngineId | None = None  # the half that trained last
        self._begun = self._finished = self._closing = self._told = self._given_up = False
        self._actions: dict[type[ev.Instruction], Callable[[Any], Coroutine[Any, Any, None]]] = {
            ev.Train: self._train,
            ev.HandOver: self._hand_over,
            ev.Restart: self._restart,
            ev.Evaluate: self._evaluate,
            ev.Checkpoint: self._checkpoint,
        }
        self._start(self._refresh())

    # ------------------------------------------------------------------------------------------- the start

    async def build(self, reward: Given | None, environment: Environment | None, stopping: Callable[[], str]) -> None:
        """Build every station and the conductor. Raises ConfigError for what only loading shows.

        Whatever ends it half way, `close` closes what was built.
        """
        config, device = self._config, self._device
        if worker.trains_here(config, worker.job_of(config)):
            worker.begin(config)
        folder = Path(config.model.path) if config.model.path else await self._base_policy(stopping)
        self._activity = "loading the model"
        shape, done, job = Architecture.from_folder(folder), self._earlier.done, worker.job_of(config)
        if self._folder.began.exists():
            await device.run(check_files, self._folder, config, folder)
        else:
            given = given_directly(reward, environment, self._caller)
            await device.run(remember, self._folder, config, folder, given)
        if job is not None:
            self._exchange = Generation(Path(config.exchange.folder), config.exchange.limit_s)
            done = self._exchange.open(agreed(config, shape, job))
        await device.run(worker.set_threads, worker.threads_of(config, shape))
        self._recorder.works(shape, *await device.run(worker.measure_machine, config), worker.adapter_of(config, shape))
        checkpoint = self._folder.path / self._earlier.checkpoint if self._earlier.checkpoint else None
        begin = worker.Beginning(self._earlier.version, checkpoint, self._earlier.lives)
        builder = Builder(config, folder, self._folder.path, device, self._built, job, begin, self._injector, self._caller)
        self._stations = await builder.build(reward, environment, self._exchange, done)
        await self._join()

    async def take(self, stations: Stations) -> None:
        """Use stations that somebody else made. They are closed as if they had been built here."""
        self._stations, self._exchange = stations, stations.exchange
        self._built.push_async_callback(stations.scorer.close)
        for trainer in stations.trainers.values():
            self._built.push_async_callback(trainer.close)
        self._built.push_async_callback(stations.close_engines)
        await self._join()

    async def _join(self) -> None:
        """The shells around the conductor, between it and the stations."""
        config, stations = self._config, self._stations
        sampling, seed = worker.sampling_of(config), config.run.seed
        if stations.player is not None:
            self._episodes = Episodes(stations.player, self._inbox.put_nowait, self._inbox.put_nowait, self._timeline)
            self._built.push_async_callback(self._episodes.close)
        self._evaluator = Evaluator(stations.held_out, sampling, stations.window, config.eval.samples, seed, stations.player)
        post, books = self._inbox.put_nowait, self._recorder
        self._learners: dict[ev.EngineId | None, Learner] = {
            half: TrainerLearner(config, trainer, stations.ranks, books.trains, books.flush)
            for half, trainer in stations.trainers.items()
        }
        if self._exchange is not None:
            self._learners[None] = self._exchange
            self._actions |= self._exchange.actions
        self._controller = Controller(
            stations.engines,
            stations.source,
            stations.scorer,
            stations.text,
            post,
            post,
            self._timeline,
            config.engine.silent_s,
            stations.vocabulary,
        )
        self._built.push_async_callback(self._rescue)
        self._built.push_async_callback(self._controller.close)
        self._sync = worker.build_sync(
            config,
            stations.publishers,
            stations.evidence,
            stations.engines,
            lambda engine, asked: self._controller.complete(asked, (engine,)),
            post,
            self._timeline,
            self._recorder,
        )
        version = self._earlier.version
        if self._exchange is not None:
            self._activity = ""  # it says itself what it waits for
            version = await self._exchange.begin(config.run.steps)
        self._saved = self._booked = version
        self.conductor = conductor_of(config, stations, version, self._earlier, self._folder)
        self._recorder.resume(version, self._counts.dropped)
        self.nodes = stations.nodes
        self.fleet = Fleet(
            config, stations, self.conductor, self._controller, self._sync, books, post, self._start, self._past.append
        )
        self._actions |= self._sync.actions | self.fleet.actions
        for name, role, spans in stations.spans:
            self._recorder.accounts.watch(name, role, spans)
        self._activity = "starting engines and trainer"
        await stations.start()
        if self._injector is not None:
            self._injector.broke = self._inbox.put_nowait
            self._injector.begin(self._folder.path, self._earlier.lives, version.step)
        self._activity = ""

    async def _base_policy(self, stopping: Callable[[], str]) -> Path:
        """The base policy of the task: from the cache, or made now. Raises Stopped when that is asked for meanwhile."""

        def progress(text: str) -> None:
            self._activity = text
            if cause := stopping():
                raise Stopped(cause)

        await self._device.run(worker.set_threads, 1)
        return await self._device.run(base_policy, self._config, cache_folder(), progress)

    # ------------------------------------------------------------------------------------------- the circle

    async def turn(self) -> AsyncIterator[Step]:
        """Take events until the conductor says that the run is over. Raises whatever broke in a station."""
        self._begun = True
        if self._caller is not None and self.conductor is not None:
            stations = self._stations
            self._caller.join(stations.source, self.conductor, stations.engines, stations.vocabulary, self._timeline)
        self._controller.listen()
        recovered = self._earlier.recovered if self._exchange is None else self._exchange.recovered
        if recovered != NOTHING.recovered:
            self._happen(recovered)
        for engine in self._stations.engines.values():
            self._happen(ev.EngineUp(engine.id, engine.slots, engine.version))
        while not self._finished:
            event, *more = await self._inbox.take()
            if isinstance(event, ev.RunBroken) and event.failed:
                await self.fail(event.cause)
            elif more:
                self._happen(event, *more)
            elif isinstance(event, ev.PromptsOffered):  # handing out requests is part of generating
                with self._timeline.phase(Phase.GENERATE), self._timeline.spans.doing(Activity.PROMPTS):
                    self._happen(event)
            else:
                for each in self.fleet.turns(event):
                    self._happen(each)
            if isinstance(event, ev.BatchTrained) and self._trained is not None:
                step = self._book(event.version, *self._trained)
                self._tell_of_flat_groups()
                self.fleet.look()
                self._recorder.picture(*self._doing())
                yield step
            await asyncio.sleep(0)  # engines and judges have their turn, however much has happened: one may have been lost

    def _happen(self, *events: ev.Event) -> None:
        """What happened at once, as one step."""
        assert self.conductor is not None
        if isinstance(events[0], ev.StopRequested) and self._exchange is not None:
            self._exchange.stop(events[0].cause)
        now = asyncio.get_running_loop().time()
        if (now_ns := int(now * 1e9)) >= self._slots.due_ns:
            self._slots.note(now_ns, self.conductor.slots)  # so it was until now
        instructions = self.conductor.steps(events, now)
        self._recorder.record((*events, *instructions))
        for each in (self._injector, self._caller):
            if each is not None:
                each.heard((*events, *instructions))
        self._controller.carry_out(instructions)
        if self._episodes is not None:
            self._episodes.carry_out(instructions)
        for instruction in instructions:
            action = self._actions.get(type(instruction))
            if action is not None:
                self._start(action(instruction))
            self._finished = self._finished or isinstance(instruction, ev.Finish)

    def _book(self, version: WeightVersion, groups: tuple[Group, ...], stats: TrainStats) -> Step:
        self._trained, self._booked = None, version
        return self._recorder.step(version, groups, stats, self._counts.dropped)

    def _tell_of_flat_groups(self) -> None:
        """Once: dynamic sampling has come to its bound."""
        if self._counts.unfiltered and not self._told:
            self._told, bound = True, self._config.rollout.refills
            warnings.warn(
                f"{bound} prompts with equal rewards were dropped for one batch, as many as rollout.refills allows: further ones "
                "are trained on as they are, and the report counts them",
                RuntimeWarning,
                stacklevel=2,
            )

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        if self._closing:  # an engine that was ordered as the run ended
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._inbox.put_nowait(error)

    @property
    def _engines(self) -> Iterable[Engine]:
        return () if self.conductor is None else self._stations.engines.values()

    @property
    def _newest(self) -> Learner:
        """Who trained last; before that all have the same."""
        learners = self._learners
        return learners[self._learned] if self._learned in learners else next(iter(learners.values()))

    @property
    def _counts(self) -> CoreCounts:
        return CoreCounts() if self.conductor is None else self.conductor.counts

    # -------------------------------------------------------------------------------------- the instructions

    async def _train(self, instruction: ev.Train) -> None:
        self._training = asyncio.current_task()
        groups, learner = instruction.groups, self._learners[instruction.half]
        with self._timeline.phase(Phase.TRAIN):
            try:
                stats = await learner.learn(instruction.step, groups)
            except GivenUp as stopped:
                self._given_up = True
                self._inbox.put_nowait(ev.RunBroken(str(stopped), failed=False))
                return
        self._trained, self._learned = (groups, stats), instruction.half
        self._inbox.put_nowait(ev.BatchTrained(learner.version))

    async def _hand_over(self, instruction: ev.HandOver) -> None:
        version, target, stations = instruction.version, instruction.target, self._stations
        with self._timeline.phase(Phase.SYNC):
            giving, taking = stations.handoffs[instruction.source], stations.handoffs[target]
            handed = await hand_over(giving, taking, version, target, self._config.weights.retries)
            await stations.trainers[target].become(version)
        self._recorder.handed(handed, stations.size)
        self._inbox.put_nowait(ev.HandedOver(version))

    async def _restart(self, instruction: ev.Restart) -> None:
        name = instruction.engine
        try:
            with self._timeline.spans.doing(Activity.RESTART, name):
                await self._stations.restart(name, self._past.append)
        except (ConfigError, EngineError, TimeLimitExceeded) as error:  # a server may have come back as another one
            self._inbox.put_nowait(ev.EngineDown(name, str(error)))
            return
        self._controller.join(name)
        self._sync.join(name, self._stations.publishers[name])
        engine = self._stations.engines[name]
        self._recorder.accounts.watch(name, ENGINE, engine.spans)
        self._inbox.put_nowait(ev.EngineUp(name, engine.slots, engine.version))

    async def _evaluate(self, instruction: ev.Evaluate) -> None:
        try:
            with self._timeline.phase(Phase.EVAL):
                scorer, (version, engines) = self._stations.scorer, (instruction.version, instruction.engines)
                result = await self._evaluator.run(self._controller, scorer, version, engines)
        except EngineLost:  # the last of them; whether one comes back is decided elsewhere
            self._inbox.put_nowait(ev.EvaluationCut(instruction.version))
            return
        found = result.mean_reward, result.samples, result.unscored, result.parts, result.tokens
        self._recorder.evaluated(instruction.version, *found)
        self._inbox.put_nowait(ev.Evaluated(instruction.version))

    async def _checkpoint(self, instruction: ev.Checkpoint) -> None:
        with self._timeline.phase(Phase.CHECKPOINT):
            counters = {"rollouts": asdict(self._counts), "report": self._recorder.totals()}
            await self._checkpoints.write(self._newest, instruction.version, self._stations.source.cursor, counters)
            self._saved = instruction.version
        self._inbox.put_nowait(ev.Checkpointed(instruction.version))

    # ------------------------------------------------------------------------------------------- the picture

    async def _refresh(self) -> None:
        while True:
            if self.conductor is not None:
                self._slots.note(self._timeline.spans.now(), self.conductor.slots)
            self._recorder.picture(*self._doing())
            self._recorder.flush()
            await asyncio.sleep(REFRESH_S)

    def _doing(self) -> tuple[str, str, float | None]:
        """What goes on, what is waited for, and the share of slots at work."""
        busy = [engine.stats() for engine in self._engines]
        waiting = self._exchange.waiting if self._exchange is not None else ""
        return self._activity, waiting, busy[0].slots_busy if busy and busy[0].steps else None

    def answer(self, order: Order) -> Answer | bytes:
        """What another process is told that gives this order."""
        glance = Glance(self._config.run.steps, *self._doing())
        if order.do == LOOK:
            return self._recorder.look(self.fleet.glance(glance) if self._begun else glance, order.known)
        return self.fleet.answer(order) if self._begun else STARTING

    # ----------------------------------------------------------------------------------------------- the end

    async def fail(self, cause: str) -> None:
        """End a run that cannot go on. What its own trainer has begun is trained, and in the books, first: it will be saved."""
        if self._training is not None and self._exchange is None and not self._finished:
            await asyncio.wait((self._training,))  # as long as a step may take
        self.end(cause, failed=True)

    def end(self, cause: str, *, failed: bool) -> None:
        """Close the books of a run that did not finish by itself: whatever is live is dropped."""
        if self._finished:
            return
        self._finished = True
        events: list[ev.Event] = [ev.RunBroken(cause, failed)]
        trained, version = self._trained, self._newest.version if self.conductor is not None else None
        if trained is not None and version is not None:
            events.insert(0, ev.BatchTrained(version))  # that was about to be heard
        finish = [ev.Finish(cause, failed, not failed)] if self.conductor is None else self.conductor.steps(events, 0.0)
        self._recorder.record((*events, *finish))
        if self._caller is not None:
            self._caller.heard(finish)
        if trained is not None and version is not None:
            self._book(version, *trained)

    async def _rescue(self) -> None:
        """Save what a run that did not end as planned had learnt since its last checkpoint."""
        if not self._begun or not (self._recorder.finish.failed or (self._given_up and self._exchange is None)):
            return
        version = self._newest.version
        try:
            version = await self._newest.settle()
            if version == self._saved:
                return
            if version != self._booked:
                raise TrainError("nobody heard how it was trained")
            await self._checkpoint(ev.Checkpoint(version))
        except RollyardError as error:
            warnings.warn(f"version {version.step} is not saved: {error}", RuntimeWarning, stacklevel=2)

    async def _leave(self) -> None:
        if self._exchange is not None:
            await self._exchange.close(self._recorder.finish)

    async def close(self) -> Report:
        """Close every station that was built, whatever one of them meets in that, and write the report.

        That of an earlier life stays, where this one ended in its start.

        Raises JournalError when the journal's last rows cannot be written, unless the run has failed for another reason.
        """
        self._closing = True
        if self._injector is not None:
            with warned(OSError):
                await self._injector.close()  # nobody stands still who is to end
            self._recorder.survived(self._injector.survival)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with warned(Exception), self._timeline.phase(Phase.SETUP), self._timeline.spans.doing(Activity.CLOSING, "stations"):
            await self._built.aclose()
        self._recorder.placed(self.nodes(), {} if self.conductor is None else self.fleet.slow)
        try:
            report = self._report()
            if self._folder.fresh or self.conductor is not None:
                with warned(OSError):
                    report.write(self._folder.report)
                with warned(OSError):
                    await self._recorder.leave_trace(self._folder.trace)
        finally:
            finish = self._recorder.finish
            with warned(JournalError, told=finish.cause) if finish.failed else nullcontext():
                self._recorder.close_journal()
        await self._recorder.left()
        return report

    def _report(self) -> Report:
        counts, live = self._counts, 0 if self.conductor is None else self.conductor.live_tokens
        return self._recorder.close(
            Counts(counts.admitted, counts.trained, dict(counts.dropped)),
            Counts(counts.members_admitted, counts.members_trained, dict(counts.members_dropped)),
            TokenLedger(counts.tokens.generated, counts.tokens.trained, dict(counts.tokens.dropped), live),
            Filtering(counts.dropped.get(DropReason.FILTERED, 0), counts.refills, counts.unfiltered),
            [*self._past, *(engine.stats() for engine in self._engines)],
        )
