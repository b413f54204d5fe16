"""The asyncio shell around the rollover: carries out what it says to publisher and engines, and reports what came of it.

One time limit covers a version from its publication to the last engine that takes it. What fails is told once for each
offer; the rollover decides whether the version is offered again. An engine that is lost meanwhile is heard of elsewhere.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollyard import events as ev
from rollyard.config import WeightsConfig
from rollyard.errors import EngineLost, WeightSyncError
from rollyard.protocols import Engine, Publisher
from rollyard.types import Manifest, WeightVersion
from rollyard.watch.recorder import Recorder
from rollyard.watch.timeline import Phase, Timeline
from rollyard.weights.flat import named
from rollyard.weights.prover import Prover

Action = Callable[[Any], Coroutine[Any, Any, None]]


class Sync:
    """Brings versions to engines.

    Args:
        publisher: the trainer's side of the transport.
        prover: looks whether what was sent arrived.
        engines: by id.
        config: limits, and what is proved.
        post: takes the events.
        timeline: the phase of weight sync is opened and closed on it.
        recorder: takes what was copied and found.
    """

    def __init__(
        self,
        publisher: Publisher,
        prover: Prover,
        engines: Mapping[ev.EngineId, Engine],
        config: WeightsConfig,
        post: Callable[[ev.Event], None],
        timeline: Timeline,
        recorder: Recorder,
    ) -> None:
        self._publisher, self._prover, self._engines, self._config = publisher, prover, engines, config
        self._post, self._timeline, self._recorder = post, timeline, recorder
        self._manifest: Manifest | None = None
        self._until = math.inf  # seconds on the event loop's clock
        self._failures = 0  # offers that failed
        self.actions: dict[type[ev.Instruction], Action] = {
            ev.Publish: self._publish,
            ev.Prepare: self._prepare,
            ev.Prove: self._prove,
            ev.Pause: self._pause,
            ev.Load: self._load,
            ev.Resume: self._resume,
            ev.Sleep: self._sleep,
            ev.Wake: self._wake,
        }

    def close(self) -> None:
        self._publisher.close()

    # --------------------------------------------------------------------------------- the instructions

    async def _publish(self, instruction: ev.Publish) -> None:
        version = instruction.version
        with self._part(version, "the trainer"):
            self._until = asyncio.get_running_loop().time() + self._config.limit_s
            async with asyncio.timeout_at(self._until):
                await self._offer(version)
                if self._config.probe:
                    await self._prover.published(version)
                self._post(ev.Published(version))
                await self._publisher.deliver()

    async def _prepare(self, instruction: ev.Prepare) -> None:
        engine, version = self._engines[instruction.engine], instruction.version
        assert self._manifest is not None, "nothing was published"
        with self._part(version, f"engine {engine.id}"):
            async with asyncio.timeout_at(self._until):
                await engine.prepare(self._manifest)
            self._post(ev.EnginePrepared(engine.id, version))

    async def _pause(self, instruction: ev.Pause) -> None:
        with self._of(instruction.engine) as engine:
            await engine.pause(instruction.rollover)
            self._post(ev.EnginePaused(engine.id))

    async def _load(self, instruction: ev.Load) -> None:
        engine, version = self._engines[instruction.engine], instruction.version
        with self._part(version, f"engine {engine.id}"):
            async with asyncio.timeout_at(self._until):
                await engine.load(version)
            self._publisher.taken(engine.id, version)
            self._post(ev.EngineLoaded(engine.id, version))

    async def _resume(self, instruction: ev.Resume) -> None:
        with self._of(instruction.engine) as engine:
            await engine.resume()
            if self._config.probe:
                self._recorder.probed(await self._prover.check(engine.id))
            self._post(ev.EngineResumed(engine.id))

    async def _sleep(self, instruction: ev.Sleep) -> None:
        """What may still run then is an attempt that was given up: it is cut first."""
        with self._of(instruction.engine) as engine:
            await engine.pause(ev.Rollover.ABORT)
            await engine.sleep()
            self._post(ev.EngineSlept(engine.id))

    async def _wake(self, instruction: ev.Wake) -> None:
        with self._of(instruction.engine) as engine:
            await engine.wake(instruction.part)
            self._post(ev.EngineWoke(engine.id, instruction.part))

    async def _prove(self, instruction: ev.Prove) -> None:
        with self._timeline.phase(Phase.SYNC):
            found = await self._prover.prove(sorted(self._engines), instruction.version, self._roll)
        self._recorder.proved(found)
        self._post(ev.Proved(instruction.version))

    # ------------------------------------------------------------------------------------------ the parts

    async def _offer(self, version: WeightVersion) -> None:
        self._manifest = await self._publisher.publish(version, sorted(self._engines))
        self._recorder.copied(self._manifest.bytes_copied)

    async def _roll(self, version: WeightVersion) -> None:
        """Bring the parameters as they are now to all engines, which are idle. Raises WeightSyncError."""
        try:
            async with asyncio.timeout(self._config.limit_s):
                await self._offer(version)
                taking = [self._take(engine, version) for engine in self._engines.values()]
                await asyncio.gather(self._publisher.deliver(), *taking)
        except TimeoutError:
            raise WeightSyncError(f"not every engine took {named(version)} within {self._config.limit_s:g} s") from None

    async def _take(self, engine: Engine, version: WeightVersion) -> None:
        assert self._manifest is not None
        await engine.prepare(self._manifest)
        await engine.pause(ev.Rollover.DRAIN)
        await engine.load(version)
        self._publisher.taken(engine.id, version)
        await engine.resume()

    @contextmanager
    def _of(self, engine: ev.EngineId) -> Iterator[Engine]:
        """A call to one engine. That it is lost is told by whoever listens to it."""
        with self._timeline.phase(Phase.SYNC):
            try:
                yield self._engines[engine]
            except EngineLost:
                self._publisher.lost(engine)

    @contextmanager
    def _part(self, version: WeightVersion, who: str) -> Iterator[None]:
        """A part of bringing `version` to the engines."""
        failures = self._failures
        with self._timeline.phase(Phase.SYNC):
            try:
                yield
            except EngineLost:
                return
            except (WeightSyncError, TimeoutError) as error:
                if failures != self._failures:
                    return  # another part of this offer failed before
                self._failures += 1
                late = f"{who} was not done within {self._config.limit_s:g} s"
                cause = late if isinstance(error, TimeoutError) else str(error)
                self._post(ev.SyncFailed(version, f"{named(version)} did not reach every engine: {cause}"))
