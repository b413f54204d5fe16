"""`Run`, which users iterate over: the life of one run, from its folder to its report. The circle itself is `ring`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from rollyard import events as ev
from rollyard import worker
from rollyard.caller import Caller
from rollyard.chaos.faults import read_faults
from rollyard.chaos.injector import Injector
from rollyard.checkpoints import At, clear
from rollyard.checks import check
from rollyard.config import Config
from rollyard.control import serving
from rollyard.driver import Inbox
from rollyard.environment import cache_folder, settle_environment
from rollyard.errors import ConfigError, RollyardError, RunFailed
from rollyard.events import EngineId
from rollyard.journal.folder import RunFolder, check_folder, folder_of, make_folder, take_folder
from rollyard.journal.journal import Journal, RunRecord
from rollyard.journal.record import Record
from rollyard.journal.recover import Past
from rollyard.model.architecture import Architecture
from rollyard.objective import told
from rollyard.protocols.devices import Sink, Tracked
from rollyard.protocols.rollouts import Environment
from rollyard.resume import (
    NOTHING,
    changed_options,
    check_files,
    check_given,
    config_of,
    finished,
    given_directly,
    left_by,
    lives,
    submitted,
)
from rollyard.reward.open import Given
from rollyard.ring import REFRESH_S, Ring, Stopped
from rollyard.stations import Stations
from rollyard.warmup import architecture, policy_folder
from rollyard.watch.recorder import Recorder
from rollyard.watch.report import Report, ReportBuilder
from rollyard.watch.sinks import JsonlSink, cut
from rollyard.watch.snapshot import Header
from rollyard.watch.step import Step
from rollyard.watch.terminal import QuietView, View
from rollyard.watch.timeline import Phase, Timeline
from rollyard.watch.trackers.open import open_trackers


class Run:
    """One run. Iterating over it, in a plain or an asynchronous loop, makes it go on: each item is one `Step`.

    Args:
        config: what to run.
        reward: a function `(prompt, completion, **columns) -> float` given directly, instead of `config.reward.function`; or
            several: a sequence of them, or a mapping of names to them.
        view: makes what the terminal shows; nothing by default.
        environment: plays episodes with the policy, given directly instead of `config.environment.name`: an object with a
            coroutine `episode(ask, prompt)`, or such a function.
        stations: gives the stations, instead of those that the config names: doubles, for measuring what is around them. It is
            given what earlier lives of the run left.
        at: told `before NAME` and `after NAME` of every write of the journal and of a checkpoint. What it raises ends the run;
            to have killed it there, it goes on to raise.
        journal: opens the journal; another one, to measure what it costs.
        caller: trains, in the place of our own trainer (`rollouts.Rollouts`).

    Raises:
        ConfigError: at once, before anything loads, when the config cannot work.
        RunFailed: while iterating, when the run cannot go on; `report` then says how far it came.
    """

    def __init__(
        self,
        config: Config,
        reward: Given | None = None,
        view: Callable[[Header], View] | None = None,
        environment: Environment | None = None,
        stations: Callable[[Past], Stations] | None = None,
        at: At | None = None,
        journal: Callable[..., Record] = Journal,
        caller: Caller | None = None,
    ) -> None:
        check_folder(config)
        self._prepare(config, reward, view, environment, stations, at, journal, caller)

    @classmethod
    def resume(cls, folder: Path | str, overrides: Mapping[str, Any] | None = None, **given: Any) -> Self:
        """The next life of a run that was killed, or stopped: it goes on from its newest whole checkpoint.

        Of a run that has nothing left to do, `finished` says so once it is iterated over: there are no steps then.

        Args:
            folder: of the run.
            overrides: options by their dotted names, other than the run had so far: those that leave it the same run.
            given: as for a new run: `reward` and `environment`, where the run was given them directly, `view`, `stations`, `at`.

        Raises:
            ConfigError: at once, for a folder that is no run's, or an option that would make another run of it. While iterating,
                before anything has changed: another process has the folder, or the model is another one now.
            JournalError: while iterating: what the run left cannot be read.
        """
        run, config = cls.__new__(cls), config_of(Path(folder), overrides)
        run._prepare(config, **given)
        run._again = not config.exchange.folder  # two jobs have their state elsewhere: there, each start goes on by itself
        return run

    def _prepare(
        self,
        config: Config,
        reward: Given | None = None,
        view: Callable[[Header], View] | None = None,
        environment: Environment | None = None,
        stations: Callable[[Past], Stations] | None = None,
        at: At | None = None,
        journal: Callable[..., Record] = Journal,
        caller: Caller | None = None,
    ) -> None:
        settle_environment()
        path = config.model.path
        self._shape = Architecture.from_folder(Path(path)) if path else architecture(config)
        check(config, self._shape, reward, environment, caller=caller is not None)
        self.config = config
        self.folder: RunFolder = folder_of(config)
        self.report: Report | None = None
        self.finished = ""  # of a run that was resumed: why nothing was left to do
        self._reward, self._environment, self._given, self._at = reward, environment, stations, at
        self._again = False  # it had lives before
        self._open_journal, self._caller = journal, caller
        self.injector = Injector(read_faults(Path(config.run.inject))) if config.run.inject else None
        self._make_view = view or (lambda header: QuietView())
        self._inbox = Inbox()
        self._stop_cause = ""
        self._ring: Ring | None = None  # while it turns

    def __iter__(self) -> Iterator[Step]:
        with asyncio.Runner() as runner:
            steps = self.steps()
            try:
                while True:
                    try:
                        step = runner.run(anext(steps))
                    except StopAsyncIteration:
                        return
                    yield step
            finally:
                runner.run(steps.aclose())

    def __aiter__(self) -> AsyncIterator[Step]:
        return self.steps()

    @property
    def nodes(self) -> Mapping[str, Sequence[str]]:
        """Of a cluster: the addresses where each host was so far, the last one last, by its name."""
        return {} if self._ring is None else self._ring.nodes()

    def stop(self, cause: str) -> None:
        """End the run cleanly: training under way is finished and saved, the rest is dropped as `stopped`."""
        self._stop_cause = cause
        self._inbox.put_nowait(ev.StopRequested(cause))

    def fail(self, cause: str) -> None:
        """End the run as failed, for what whoever iterates over it met. What is trained just now is trained first."""
        self._stop_cause = cause
        self._inbox.put_nowait(ev.RunBroken(cause, failed=True))

    def add_engine(self, url: str = "") -> EngineId:
        """Begin to start one more engine, or to use a running server; from any thread, while the run is iterated over.

        It gets requests once it has the newest weights and, where the run proves that they arrive, once that was proved.

        Args:
            url: of the server, where engines are running servers.

        Returns the engine's name. Raises ConfigError where this run can have no more, or is not going on.
        """
        return self._going.fleet.add(url)

    def remove_engine(self, engine: EngineId, cut: bool = False) -> None:
        """Let an engine go; from any thread, while the run is iterated over. It gets no request any more.

        Args:
            cut: what it holds goes on elsewhere, with the tokens it has; else it finishes that first.

        Raises ConfigError when there is no such engine, when it is the last, or when the run is not going on.
        """
        self._going.fleet.remove(engine, cut)

    @property
    def _going(self) -> Ring:
        if self._ring is None:
            problem = "engines come and go while a run is going on, and this one is not"
            raise ConfigError(problem, where="engine", remedy="iterate over it")
        return self._ring

    async def steps(self) -> AsyncGenerator[Step]:
        """The steps, as they are done. Once only."""
        timeline = Timeline(_nanoseconds, time.thread_time_ns)
        with ExitStack() as held:
            with timeline.phase(Phase.SETUP):
                folder, past = self._opened(held)
            if self.finished:
                return
            with timeline.phase(Phase.SETUP):
                recorder = self._recorder(folder, timeline)
                ring = Ring(self.config, folder, timeline, recorder, self._inbox, past, self._at, self.injector, self._caller)
            try:
                async with serving(folder.path, ring.answer):
                    with timeline.phase(Phase.SETUP):
                        await self._unless_stopped(ring, past)
                        if self._again:
                            self._go_on(folder, recorder, past)
                    recorder.begin()
                    self._ring = ring
                    async for step in ring.turn():
                        yield step
            except Stopped as stopped:
                ring.end(str(stopped), failed=False)
            except ConfigError as error:
                ring.end(str(error), failed=True)
                if ring.conductor is None and folder.fresh:  # nothing was run in it: not in the way of the mended command
                    held.callback(folder.remove)
                raise
            except Exception as error:
                await ring.fail(str(error) if isinstance(error, RollyardError) else f"{type(error).__name__}: {error}")
                raise
            finally:
                self._ring = None
                ring.end("left by the caller", failed=False)
                self.report = await ring.close()
        if self.report.finished.failed:
            raise RunFailed(self.report.finished.cause)

    def _opened(self, held: ExitStack) -> tuple[RunFolder, Past]:
        """The folder, as long as it is held, and what is left in it of earlier lives."""
        folder = take_folder(self.folder.path) if self._again else make_folder(self.config)
        held.callback(folder.release)
        if not self._again:
            return folder, NOTHING
        past = left_by(folder, self.config.run.steps)
        if self._caller is not None and past.lives:
            self._caller.submitted = submitted(folder, past)
        for error in changed_options(folder, self.config) if past.lives else ():
            raise error  # somebody has edited the file
        self.finished = finished(folder, past, self.config.run.steps)
        if self.finished and self._caller is not None:
            self._caller.has_ended(past.version, folder.path / past.checkpoint if past.checkpoint else None)
        if not self.finished and self._given is None:
            check_given(folder, given_directly(self._reward, self._environment, self._caller), past)
            path = self.config.model.path
            model = Path(path) if path else policy_folder(self.config, cache_folder())
            if folder.began.exists() and model.is_dir():  # one that is yet to be made is looked at once it is there
                check_files(folder, self.config, model)
        folder.clear()  # nothing is refused any more
        return folder, past

    def _go_on(self, folder: RunFolder, recorder: Recorder, past: Past) -> None:
        """The next life has begun: what the folder has of steps that will be done again is no more."""
        clear(folder, past.checkpoint, past.unnamed)
        folder.write_config(self.config)
        rows = cut(folder.metrics, past.version.step)
        recorder.go_on(lives(folder, past), past.counters.get("report"), rows)

    async def _unless_stopped(self, ring: Ring, past: Past) -> None:
        """Build, and give it up at once when the run is stopped meanwhile. Raises Stopped then."""
        if self._given is None:
            building = asyncio.ensure_future(ring.build(self._reward, self._environment, lambda: self._stop_cause))
        else:
            building = asyncio.ensure_future(ring.take(self._given(past)))
        try:
            while not building.done():
                await asyncio.wait((building,), timeout=REFRESH_S)
                if self._stop_cause:
                    raise Stopped(self._stop_cause)
            building.result()
        finally:  # also when nobody waits for it any more
            if not building.done():
                building.cancel()
                await asyncio.wait((building,))

    def _recorder(self, folder: RunFolder, timeline: Timeline) -> Recorder:
        config = self.config
        version = metadata.version("rollyard")
        about = RunRecord(config.run.name, version, config.run.seed, config.rollout.group_size, config.model_dump_json())
        model = config.model.path or f"base policy of {config.prompts.task}"
        placement, engine = config.place.placement, config.engine.kind
        builder = ReportBuilder(
            name=config.run.name,
            model=model,
            placement=placement,
            engine=engine,
            transport=worker.transport_of(config),
            objective=told(config, worker.size_of(config, self._shape)) if self._caller is None else "the caller's own",
        )
        view = self._make_view(Header(config.run.name, model, placement, engine, config.run.steps))
        batch = config.rollout.groups_per_step * config.rollout.group_size
        journal = self._open_journal(folder.journal, about, timer=lambda: _nanoseconds() / 1e9, at=self._at)
        sinks: list[Sink] = [JsonlSink(folder.metrics), *open_trackers(config.watch.sinks, timeline)]
        run = Tracked(config.run.name, folder.path, config.watch.project, config.model_dump(mode="json"), not folder.fresh)
        return Recorder(journal, builder, sinks, view, timeline, batch, config.forecast, run, folder.timeline)


def _nanoseconds() -> int:
    """On the event loop's clock, which is virtual where waiting is."""
    return int(asyncio.get_running_loop().time() * 1e9)
