"""Serves an engine over a line: the other end of `remote.RemoteEngine`."""

from __future__ import annotations

import asyncio
from time import monotonic

from rollyard.engine import wire
from rollyard.errors import EngineError
from rollyard.events import Rollover, WakePart
from rollyard.protocols.processes import Channel
from rollyard.protocols.rollouts import Engine
from rollyard.types import FinishReason, Request, Segment, WeightVersion
from rollyard.watch.spans import tell, telling

STATS_S = 0.2  # seconds between two reports of totals
STEPS_S = 1.0  # of steps that bring no token, seconds


class EngineHost:
    """Answers the calls of one run."""

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine, self._channel = engine, channel
        self._reported_at, self._steps = 0.0, 0
        for name in ("start", "generate", "abort", "pause", "prepare", "load", "resume", "sleep", "wake"):
            channel.handle(name, getattr(self, f"_{name}"))
        channel.ready()

    async def forward(self) -> None:
        """Send what the engine writes until it is closed. Raises EngineLost when a step failed."""
        async for segments in self._engine.segments():
            self._channel.tell("segments", wire.SEGMENTS.dump_json(segments))
            if monotonic() - self._reported_at > STATS_S or any(segment.finish for segment in segments):
                self._report()

    async def report_steps(self) -> None:
        """Totals also while no tokens come: a long prompt is read, and the engine does not stand still."""
        while True:
            await asyncio.sleep(STEPS_S)
            if self._engine.stats().steps != self._steps and monotonic() - self._reported_at > STATS_S:
                self._report()

    def _report(self) -> None:
        self._reported_at, stats = monotonic(), self._engine.stats()
        self._steps = stats.steps
        self._channel.tell("stats", wire.STATS.dump_json(stats))
        tell(self._engine.spans, self._channel)

    def _report_version(self) -> None:
        """Told rather than answered: it counts also when whoever asked for the load has given up meanwhile."""
        if self._engine.version is not None:
            self._channel.tell("version", wire.VERSION.dump_json(self._engine.version))

    async def _start(self, content: bytes) -> bytes:
        await self._engine.start()
        self._report_version()
        return wire.STATS.dump_json(self._engine.stats())

    async def _generate(self, content: bytes) -> bytes:
        for request in self._refused(wire.REQUESTS.validate_json(content)):
            self._refused((request,))
        return b""

    def _refused(self, requests: tuple[Request, ...]) -> tuple[Request, ...]:
        """Hand requests over. Those to be tried one by one are returned; a single one that is refused ends with ERROR."""
        try:
            self._engine.generate(requests)
        except EngineError as error:
            if len(requests) > 1:
                return requests
            version = self._engine.version or WeightVersion(0)
            segment = Segment(requests[0].id, (), (), version, version, FinishReason.ERROR, str(error))
            self._channel.tell("segments", wire.SEGMENTS.dump_json((segment,)))
        return ()

    async def _abort(self, content: bytes) -> bytes:
        await self._engine.abort(wire.IDS.validate_json(content))
        return b""

    async def _pause(self, content: bytes) -> bytes:
        await self._engine.pause(Rollover(content.decode()))
        await asyncio.sleep(0)  # what was cut is sent before the answer
        self._report()
        return b""

    async def _prepare(self, content: bytes) -> bytes:
        await self._engine.prepare(wire.MANIFEST.validate_json(content))
        tell(self._engine.spans, self._channel)
        return b""

    async def _load(self, content: bytes) -> bytes:
        await self._engine.load(wire.VERSION.validate_json(content))
        self._report_version()
        self._report()
        return b""

    async def _resume(self, content: bytes) -> bytes:
        await self._engine.resume()
        self._report()
        return b""

    async def _sleep(self, content: bytes) -> bytes:
        await self._engine.sleep()
        self._report()
        return b""

    async def _wake(self, content: bytes) -> bytes:
        await self._engine.wake(WakePart(content.decode()))
        self._report()
        return b""


async def serve(engine: Engine, channel: Channel) -> None:
    """Answer calls and forward tokens until the line ends; the engine is closed then. Raises EngineLost when a step failed."""
    host = EngineHost(engine, channel)
    parts = (channel.ended(), host.forward(), host.report_steps())
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        async with telling(engine.spans, channel):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.close()
