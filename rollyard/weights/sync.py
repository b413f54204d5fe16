"""The asyncio shell around the rollover: carries out what it says to publisher and engines, and reports what came of it.

One time limit covers a version from its publication until its bytes are near every engine, and each engine's load has as
long again: finishing what runs, in between, takes as long as it takes. Each part that fails is told; the rollover decides
whether the version is offered again. That an engine is lost is heard of elsewhere; one that does not answer in time is reported
as silent, unless it may have waited for the trainer.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from rollyard import events as ev
from rollyard.config import WeightsConfig
from rollyard.errors import EngineError, EngineLost, TimeLimitExceeded, WeightSyncError
from rollyard.fitness import EngineProbed, EngineUnfit, Probe
from rollyard.protocols.rollouts import Engine
from rollyard.protocols.weights import Publisher
from rollyard.types import Activity, Verdict, WeightVersion
from rollyard.watch.recorder import Recorder
from rollyard.watch.timeline import Phase, Timeline
from rollyard.weights.many import Offers
from rollyard.weights.prover import Prover
from rollyard.weights.words import named

Action = Callable[[Any], Coroutine[Any, Any, None]]

LOOK_S = 30.0  # seconds that a probe between two loads may take
LOSS_S = 2.0  # seconds between a failure and the news that the loss of an engine was its cause


class Sync:
    """Brings versions to engines.

    Args:
        publishers: the trainer's side of the transport, by engine; usually the same one for all.
        prover: looks whether what was sent arrived.
        engines: by id.
        config: limits, and what is proved.
        post: takes the events.
        timeline: the phase of weight sync is opened and closed on it.
        recorder: takes what was copied and found.
    """

    def __init__(
        self,
        publishers: Mapping[ev.EngineId, Publisher],
        prover: Prover,
        engines: Mapping[ev.EngineId, Engine],
        config: WeightsConfig,
        post: Callable[[ev.Event], None],
        timeline: Timeline,
        recorder: Recorder,
    ) -> None:
        self._offers, self._prover, self._engines, self._config = Offers(publishers), prover, engines, config
        self._post, self._timeline, self._recorder = post, timeline, recorder
        self._living = set(engines)
        self._unseen: set[ev.EngineId] = set()  # were offered parameters that the prover has not looked at
        self._until = math.inf  # seconds on the event loop's clock
        self._sending = False  # the trainer still delivers what was offered last
        self._probing: dict[ev.EngineId, asyncio.Event] = {}  # set once the last probe between two loads is over
        self.actions: dict[type[ev.Instruction], Action] = {
            ev.Publish: self._publish,
            ev.Prepare: self._prepare,
            ev.Prove: self._prove,
            ev.Forget: self._forget,
            ev.Pause: self._pause,
            ev.Load: self._load,
            ev.Resume: self._resume,
            Probe: self._probe,
            ev.Sleep: self._sleep,
            ev.Wake: self._wake,
        }

    def join(self, engine: ev.EngineId, publisher: Publisher) -> None:
        """There is an engine of this name: a new one, or one that has taken the place of one that was lost."""
        self._offers.serve(engine, publisher)
        self._living.add(engine)

    def leave(self, engine: ev.EngineId) -> None:
        """It is about to be closed: nothing is offered to it any more."""
        self._lose(engine)

    # --------------------------------------------------------------------------------- the instructions

    async def _publish(self, instruction: ev.Publish) -> None:
        """To all engines; or to those that are named, which get the same bytes when this version was offered last."""
        version = instruction.version
        with self._part(version):
            self._until = asyncio.get_running_loop().time() + self._config.limit_s
            async with asyncio.timeout_at(self._until):
                offered = await self._offer(version, instruction.engines)
                if self._config.probe and self._unseen:
                    await self._prover.published(version, sorted(self._unseen))
                self._unseen.clear()
                self._sending = True
                self._post(ev.Published(version, offered))  # from here on the parameters may change
                try:
                    for sent in await self._offers.deliver():
                        self._recorder.sent(sent)
                finally:
                    self._sending = False
            self._post(ev.Delivered(version))

    async def _prepare(self, instruction: ev.Prepare) -> None:
        engine, version = self._engines[instruction.engine], instruction.version
        with self._part(version, engine.id):
            async with asyncio.timeout_at(self._until):
                await engine.prepare(self._offers.manifest(engine.id))
            self._post(ev.EnginePrepared(engine.id, version))

    async def _pause(self, instruction: ev.Pause) -> None:
        with self._of(instruction.engine) as engine:
            if (probing := self._probing.pop(engine.id, None)) is not None:
                await probing.wait()
            drains = instruction.rollover is ev.Rollover.DRAIN  # which takes as long as it takes; who writes nothing is noticed
            async with asyncio.timeout(None if drains else self._config.limit_s):
                await engine.pause(instruction.rollover)
            self._post(ev.EnginePaused(engine.id))

    async def _load(self, instruction: ev.Load) -> None:
        engine, version = self._engines[instruction.engine], instruction.version
        with self._part(version, engine.id):
            async with asyncio.timeout(self._config.limit_s):
                await engine.load(version)
            self._took(engine, version)
            self._post(ev.EngineLoaded(engine.id, version))

    async def _resume(self, instruction: ev.Resume) -> None:
        with self._of(instruction.engine) as engine:
            async with asyncio.timeout(self._config.limit_s):
                await engine.resume()
            try:
                with self._timeline.spans.doing(Activity.SYNC, "probe"):
                    good = not self._config.probe or await self._judge(engine.id, self._prover.check)
                if good:
                    self._post(ev.EngineResumed(engine.id))
            except EngineLost:
                raise
            except EngineError as error:
                self._unfit(engine.id, str(error))

    async def _probe(self, instruction: Probe) -> None:
        """Whoever brings it new weights waits for the answer, unless that is late: every slot may be taken. What is refused, cut
        or late says nothing."""
        engine, done = instruction.engine, asyncio.Event()
        self._probing[engine] = done
        try:
            with suppress(TimeoutError, TimeLimitExceeded):
                async with asyncio.timeout(LOOK_S):
                    await self._judge(engine, self._prover.look)
        except EngineLost:
            self._lose(engine)
        except EngineError:
            return
        finally:
            done.set()

    async def _judge(self, engine: ev.EngineId, ask: Callable[[ev.EngineId], Awaitable[Verdict]]) -> bool:
        """Does it decode with what it says, as far as can be seen? Raises TimeLimitExceeded and EngineLost."""
        try:
            verdict, cause = await ask(engine), ""
        except WeightSyncError as error:
            verdict, cause = Verdict.CONTRADICTED, str(error)
        self._recorder.probed(verdict)
        self._post(EngineProbed(engine, verdict, cause))
        return verdict is not Verdict.CONTRADICTED

    async def _sleep(self, instruction: ev.Sleep) -> None:
        """What may still run then is an attempt that was given up: it is cut first."""
        with self._of(instruction.engine) as engine:
            async with asyncio.timeout(self._config.limit_s):
                await engine.pause(ev.Rollover.ABORT)
                await engine.sleep()
            self._post(ev.EngineSlept(engine.id))

    async def _wake(self, instruction: ev.Wake) -> None:
        with self._of(instruction.engine) as engine:
            async with asyncio.timeout(self._config.limit_s):
                await engine.wake(instruction.part)
            self._post(ev.EngineWoke(engine.id, instruction.part))

    async def _prove(self, instruction: ev.Prove) -> None:
        spans = self._timeline.spans
        began_ns = spans.now()
        with self._timeline.phase(Phase.SYNC, "canary"), spans.doing(Activity.SYNC, "canary"):
            await asyncio.gather(*(self._finish(engine) for engine in sorted(self._living)))
            found = await self._prover.prove(sorted(self._living), instruction.version, self._roll)
        self._unseen.clear()  # every version since was one of the canary's, and looked at
        self._recorder.proved(replace(found, seconds=(spans.now() - began_ns) / 1e9))
        self._post(ev.Proved(instruction.version))

    async def _finish(self, engine: ev.EngineId) -> None:
        """What runs there comes to its end, which takes as long as it takes."""
        with self._of(engine) as one:
            await one.pause(ev.Rollover.DRAIN)
            await one.resume()

    async def _forget(self, instruction: ev.Forget) -> None:
        self._lose(instruction.engine)

    # ------------------------------------------------------------------------------------------ the parts

    async def _offer(self, version: WeightVersion, engines: Sequence[ev.EngineId] = ()) -> tuple[ev.EngineId, ...]:
        """Returns to whom: those of them that live, and did all the while."""
        offered = sorted(self._living.intersection(engines) if engines else self._living)
        found = await self._offers.offer(version, offered, again=bool(engines))
        self._unseen.update(found.afresh)
        self._recorder.copied(found.bytes_copied)
        return tuple(engine for engine in offered if self._offers.has(engine))  # one may have been lost, and be back by now

    async def _roll(self, version: WeightVersion) -> None:
        """Bring the parameters as they are now to all engines, which are idle; to those that are left when one is lost.

        Raises WeightSyncError, and EngineLost when none is left.
        """
        try:
            async with asyncio.timeout(self._config.limit_s):
                while not await self._rolled(version):
                    pass
        except TimeoutError:
            raise WeightSyncError(f"not every engine took {named(version)} within {self._config.limit_s:g} s") from None

    async def _rolled(self, version: WeightVersion) -> bool:
        """False when an engine was lost meanwhile: the others may not have got it all."""
        offered = await self._offer(version)
        parts = [self._offers.deliver(), *(self._take(self._engines[engine], version) for engine in offered)]
        tasks = [asyncio.ensure_future(part) for part in parts]
        try:
            _, late = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if late:
                await asyncio.wait(late, timeout=LOSS_S)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        lost = any(isinstance(error, EngineLost) for error in errors)
        for error in errors:
            if not lost or not self._living:
                raise error
        return not lost

    async def _take(self, engine: Engine, version: WeightVersion) -> None:
        try:
            await engine.prepare(self._offers.manifest(engine.id))
            await engine.pause(ev.Rollover.DRAIN)
            await engine.load(version)
            self._took(engine, version)
            await engine.resume()
        except EngineLost:
            self._lose(engine.id)
            raise

    def _took(self, engine: Engine, version: WeightVersion) -> None:
        if engine.id in self._living:
            self._offers.taken(engine.id, version)

    def _lose(self, engine: ev.EngineId) -> None:
        if engine in self._living:
            self._living.discard(engine)
            self._offers.lost(engine)

    @contextmanager
    def _of(self, engine: ev.EngineId) -> Iterator[Engine]:
        """A call to one engine. That it is lost is told by whoever listens to it."""
        with self._timeline.phase(Phase.SYNC):
            try:
                yield self._engines[engine]
            except EngineLost:
                self._lose(engine)
            except (TimeoutError, TimeLimitExceeded) as error:
                self._unfit(engine, str(error))

    def _unfit(self, engine: ev.EngineId, cause: str) -> None:
        """It is taken out for that."""
        self._post(EngineUnfit(engine, cause or f"it did not do what it was told to within {self._config.limit_s:g} s"))

    @contextmanager
    def _part(self, version: WeightVersion, engine: ev.EngineId | None = None) -> Iterator[None]:
        """A part of bringing `version` to the engines: of one of them, or of the trainer."""
        with self._timeline.phase(Phase.SYNC):
            try:
                yield
            except EngineLost:
                if engine is None:  # a trainer's loss is a TrainError, and ends the run
                    raise
                self._lose(engine)
            except (WeightSyncError, EngineError, TimeoutError, TimeLimitExceeded) as error:
                if isinstance(error, TimeoutError | TimeLimitExceeded) and engine is not None and not self._sending:
                    self._unfit(engine, str(error))
                    return
                who = "the trainer" if engine is None else f"engine {engine}"
                late = f"{who} was not done within {self._config.limit_s:g} s"
                self._post(ev.SyncFailed(version, late if isinstance(error, TimeoutError) else str(error), engine))
