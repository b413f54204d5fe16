"""Engines that come to a running run, and go.

    add ──► starting ──► EngineUp ──► synced, probed, proved ──► requests
    remove ──► EngineLeaving ──► finished or cut ──► Retire ──► closed
    lost, and not started again ───────────────────► Retire ──► closed

`add`, `remove` and `states` may be called from any thread; everything else happens on the run's event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import warnings
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from rollyard import events as ev
from rollyard.combinations import check_engine_address
from rollyard.conductor import Conductor
from rollyard.config import Config
from rollyard.control import Answer, Order
from rollyard.driver import Leaving
from rollyard.errors import ConfigError, EngineError, TimeLimitExceeded
from rollyard.rollout.controller import Controller
from rollyard.stations import Stations
from rollyard.texts import visible
from rollyard.types import Activity, EngineStats
from rollyard.watch.accounts import ENGINE
from rollyard.watch.live import Glance
from rollyard.watch.recorder import Recorder
from rollyard.watch.report import Counts
from rollyard.weights.sync import Sync

SLOW = 3  # times slower than the median: that is reported

STARTING, UP, LEAVING, AGAIN, LOST = "starting", "up", "leaving", "being started again", "lost"


class Fleet:
    """The engines of one run.

    Args:
        post: takes the events.
        start: begins a task; what it raises ends the run.
        keep: takes the totals of an engine that left, or is lost.
    """

    def __init__(
        self,
        config: Config,
        stations: Stations,
        conductor: Conductor,
        controller: Controller,
        sync: Sync,
        recorder: Recorder,
        post: Callable[[ev.Event], None],
        start: Callable[[Coroutine[Any, Any, None]], None],
        keep: Callable[[EngineStats], None],
    ) -> None:
        self._config, self._stations, self._conductor = config, stations, conductor
        self._controller, self._sync, self._recorder = controller, sync, recorder
        self._post, self._start, self._keep = post, start, keep
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._numbers = itertools.count(len(stations.engines))
        self._urls = {f"engine-{number}": url.rstrip("/") for number, url in enumerate(config.engine.url)}
        self._starting: dict[ev.EngineId, None] = {}
        self._leaving = Leaving(lambda: conductor.staying, _stays)
        self._failed: dict[ev.EngineId, str] = {}
        self.slow: dict[ev.EngineId, int] = {}  # times slower than the median, at worst
        self.actions: dict[type[ev.Instruction], Callable[[Any], Coroutine[Any, Any, None]]] = {ev.Retire: self._retire}

    def add(self, url: str = "") -> ev.EngineId:
        """Begin to start an engine, or to use a running server: its name. It works once it has the newest weights.

        Raises ConfigError where this run can have no more.
        """
        self._check(url)
        with self._lock:
            if url.rstrip("/") in self._urls.values():
                raise ConfigError(f"{url} is an engine of this run already", where="engine.url", remedy="name another server")
            name = f"engine-{next(self._numbers)}"
            if url:
                self._urls[name] = url.rstrip("/")
            self._starting[name] = None
        self._loop.call_soon_threadsafe(lambda: self._start(self._add(name, url)))
        return name

    def remove(self, engine: ev.EngineId, cut: bool = False) -> None:
        """Let an engine go: it finishes what it holds, or (`cut`) that goes on elsewhere with the tokens it has.

        Raises ConfigError when there is no such engine, or no other.
        """
        with self._lock:
            staying = sorted(self._conductor.staying - self._leaving.engines)
            if engine not in staying:
                state = dict(self.states()).get(engine)
                problem = f"{engine} is {state}" if state else f"this run has no engine {engine}"
                remedy = f"one of: {', '.join(staying)}" if staying else "wait until an engine is up"
                raise ConfigError(problem, where="engine", remedy=remedy)
            if len(staying) == 1:
                problem = f"{engine} is the last engine, and without one nothing is generated"
                raise ConfigError(problem, where="engine", remedy="add another one first, or stop the run")
            order = self._leaving.order(engine, cut)
        self._loop.call_soon_threadsafe(self._post, order)

    def states(self) -> tuple[tuple[ev.EngineId, str], ...]:
        """Every engine and what it does."""
        staying, leaving, lost = self._conductor.staying, self._leaving.engines, self._conductor.lost
        here = {name: UP if name in staying else AGAIN for name in list(self._stations.engines)}
        here |= dict.fromkeys(list(self._starting), STARTING) | {name: LEAVING for name in here if name in leaving}
        here |= {name: LOST for name in here if name in lost}
        return tuple((here | self._failed).items())

    def answer(self, order: Order) -> Answer:
        """Do what another process asks."""
        try:
            if order.do == "add":
                name = self.add(order.url)
                return Answer(f"{name} is being started; it gets requests once it has the newest weights", self.states())
            if order.do == "remove":
                self.remove(order.engine, order.cut)
                how = "what it holds goes on elsewhere" if order.cut else "it finishes what it holds first"
                return Answer(f"{order.engine} leaves; {how}", self.states())
        except ConfigError as error:
            return Answer(problem=error.problem, where=error.where, remedy=error.remedy)
        return Answer(engines=self.states())

    def glance(self, glance: Glance) -> Glance:
        """With what engines hold and where prompts are."""
        conductor, counts = self._conductor, self._conductor.counts
        return replace(
            glance,
            engines=conductor.engines,
            states=dict(self.states()),
            queue=conductor.waiting,
            live=conductor.live,
            prompts=Counts(counts.admitted, counts.trained, counts.dropped),
            members=Counts(counts.members_admitted, counts.members_trained, counts.members_dropped),
        )

    # --------------------------------------------------------------------------------------------- on the loop

    def look(self) -> None:
        """Which engines are far slower than the others, for the report."""
        for name, times in self._conductor.slow.items():
            if times >= SLOW:
                self.slow[name] = max(times, self.slow.get(name, 0))

    def turns(self, event: ev.Event) -> Sequence[ev.Event]:
        """What this becomes now, see `driver.Leaving`."""
        return self._leaving.turns(event)

    async def _add(self, name: ev.EngineId, url: str) -> None:
        try:
            with self._recorder.accounts.doing(Activity.RESTART, name):
                engine = await self._stations.add(name, url)
        except (ConfigError, EngineError, TimeLimitExceeded) as error:
            self._failed[name] = f"not started: {error}"
            self._urls.pop(name, None)
            warnings.warn(visible(f"{name} could not be started: {error}"), RuntimeWarning, stacklevel=2)
            return
        finally:
            self._starting.pop(name, None)
        self._controller.join(name)
        self._sync.join(name, self._stations.publishers[name])
        self._recorder.accounts.watch(name, ENGINE, engine.spans)
        self._post(ev.EngineUp(name, engine.slots, engine.version))

    async def _retire(self, instruction: ev.Retire) -> None:
        """What is begun after this, in the same step already, knows nothing of it: there is no waiting before that."""
        name = instruction.engine
        self._controller.leave(name)
        self._sync.leave(name)
        await self._stations.remove(name, self._keep)
        self._recorder.accounts.left(name)
        self._leaving.left(name)
        self._urls.pop(name, None)

    def _check(self, url: str) -> None:
        """Raises ConfigError."""
        config = self._config
        if not config.place.apart or self._stations.launch is None:
            problem = f"with placement {config.place.placement} engines share the trainers' devices, and none comes or goes"
            raise ConfigError(problem, where="place.placement", remedy="use separate or async")
        if bool(url) != bool(config.engine.url):
            kept = ("are running servers", "give its address") if config.engine.url else ("are started by it", "give no address")
            raise ConfigError(f"the engines of this run {kept[0]}", where="engine.url", remedy=kept[1])
        if url:
            check_engine_address(url)


def _stays(engine: ev.EngineId, cause: str) -> None:
    warnings.warn(visible(f"{engine} stays: {cause}"), RuntimeWarning, stacklevel=2)
