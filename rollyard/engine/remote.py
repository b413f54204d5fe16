"""An engine in another process, as the run sees it: every call crosses a line, tokens come back as they are written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from rollyard.engine import admission, wire
from rollyard.engine.closing import attempt
from rollyard.errors import EngineError, EngineLost, TimeLimitExceeded
from rollyard.events import Rollover, WakePart
from rollyard.protocols.processes import Process
from rollyard.types import Capabilities, EngineStats, FinishReason, Manifest, Request, RequestId, Segment, WeightVersion
from rollyard.watch.spans import hear

Bend = Callable[[tuple[Segment, ...]], tuple[Segment, ...]]
QUICK_S = 60.0  # seconds for what should take none; a busy machine may be slow


class RemoteEngine:
    """Implements `protocols.Engine` over a channel, whose other end is `host.serve`.

    Args:
        id: its name.
        channel: the line to its process; closed with the engine.
        capabilities: what the engine there can do.
        start_s: seconds it may take to load and be ready.
        sync_s: seconds that bringing weights near, or switching to them, may take.
        drain_s: seconds that finishing what runs may take.
        alone: nothing else is in its process.
        bend: makes of what came what is taken for it, where answers are to be wrong on purpose.
    """

    def __init__(
        self,
        id: str,
        channel: Process,
        capabilities: Capabilities,
        *,
        start_s: float,
        sync_s: float,
        drain_s: float,
        alone: bool = True,
        bend: Bend | None = None,
    ) -> None:
        self._id, self._channel, self._capabilities = id, channel, capabilities
        self._start_s, self._sync_s, self._drain_s = start_s, sync_s, drain_s
        self._alone, self._bend, self._slots = alone, bend, 0
        self._version: WeightVersion | None = None
        self._stats = EngineStats()
        self._open: set[RequestId] = set()  # requests whose last segment has not come
        self._ready: asyncio.Queue[tuple[Segment, ...] | None] = asyncio.Queue()  # None: no more will come
        self._asleep = self._closed = False
        self._held = ""  # why it takes no requests until it is resumed
        self._cause = ""
        self._watching: asyncio.Task[None] | None = None
        channel.handle("segments", self._take_segments)
        channel.handle("stats", self._take_stats)
        channel.handle("version", self._take_version)
        self.spans = hear(channel)
        channel.ready()

    @property
    def id(self) -> str:
        return self._id

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def version(self) -> WeightVersion | None:
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    async def start(self) -> None:
        """Wait until the engine there is ready. Raises EngineLost with its cause, or TimeLimitExceeded."""
        self._watching = asyncio.create_task(self._watch(), name=f"engine {self._id}")
        await self._take_stats(await self._channel.call("start", limit_s=self._start_s))
        self._slots = self._stats.slots

    def generate(self, requests: Sequence[Request]) -> None:
        """Hand over requests. One that the engine there refuses comes back as a segment that finishes with ERROR."""
        self._check_alive()
        asleep, acknowledged = self._asleep, self._version is not None
        admission.check(self._id, requests, self._open, acknowledged=acknowledged, asleep=asleep, held=self._held)
        self._channel.tell("generate", wire.REQUESTS.dump_json(tuple(requests)))
        self._open.update(request.id for request in requests)

    async def segments(self) -> AsyncIterator[tuple[Segment, ...]]:
        """What was written, as it comes. Raises EngineLost once the engine is gone."""
        while (segments := await self._ready.get()) is not None:
            yield segments
        if not self._closed:
            self._check_alive()

    async def abort(self, requests: Sequence[RequestId]) -> None:
        """Cut these requests. What they wrote comes out of `segments`."""
        self._check_alive()
        await self._quick("abort", wire.IDS.dump_json(tuple(requests)), QUICK_S)

    async def pause(self, rollover: Rollover) -> None:
        """Stop at a token boundary; under DRAIN once every request has ended. What was written till then has come by then."""
        self._check_alive()
        drains = rollover is Rollover.DRAIN
        before, self._held = self._held, "is finishing what it has" if drains else "is being paused"
        try:
            if drains:
                await self._channel.call("pause", rollover.encode(), limit_s=self._drain_s)
            else:
                await self._quick("pause", rollover.encode(), QUICK_S)
        except EngineError:  # refused; one that is only late may still come to a stop
            self._held = before
            raise
        self._held = "is paused"

    async def prepare(self, manifest: Manifest) -> None:
        """Bring the tensors near the engine. Raises WeightSyncError, TimeLimitExceeded when that takes too long."""
        self._check_alive()
        await self._channel.call("prepare", wire.MANIFEST.dump_json(manifest), limit_s=self._sync_s)

    async def load(self, version: WeightVersion) -> None:
        """Switch to `version`. Raises WeightSyncError, TimeLimitExceeded when that takes too long: it may come to it later."""
        self._check_alive()
        await self._channel.call("load", wire.VERSION.dump_json(version), limit_s=self._sync_s)

    async def resume(self) -> None:
        self._check_alive()
        await self._quick("resume", b"", QUICK_S)
        self._held = ""

    async def sleep(self) -> None:
        self._check_alive()
        await self._quick("sleep", b"", self._sync_s)
        self._asleep = True

    async def wake(self, part: WakePart) -> None:
        self._check_alive()
        await self._quick("wake", part.encode(), self._sync_s)
        self._asleep = self._asleep and part is not WakePart.CACHE

    def stats(self) -> EngineStats:
        """As of the last tokens that came."""
        return self._stats

    def condemn(self, cause: str) -> None:
        """Kill the process there. Raises EngineError when a trainer is in it."""
        if not self._alone:
            raise EngineError(f"engine {self._id} shares its process with a trainer and cannot be taken out: {cause}")
        if not self._closed:
            self._lose(cause)
            self._channel.kill()

    async def close(self) -> None:
        """Cut what runs, end the process there. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        await attempt(self._channel.close(), parts=2)  # the process may take one of them to end by itself
        self._finish_open(FinishReason.ABORT, "")
        self._ready.put_nowait(None)

    async def _quick(self, name: str, content: bytes, limit_s: float) -> None:
        """An engine that does not answer is of no more use: it counts as lost, for all who use it."""
        try:
            await self._channel.call(name, content, limit_s=limit_s)
        except TimeLimitExceeded as error:
            self._lose(f"it did not answer {name} within {limit_s:g} s")
            if self._alone:
                self._channel.kill()
            raise EngineLost(f"engine {self._id} is lost: {error}") from error

    async def _take_segments(self, content: bytes) -> bytes:
        segments = wire.SEGMENTS.validate_json(content)
        segments = segments if self._bend is None else self._bend(segments)
        self._open.difference_update(segment.request for segment in segments if segment.finish is not None)
        self._ready.put_nowait(segments)
        return b""

    async def _take_version(self, content: bytes) -> bytes:
        self._version = wire.VERSION.validate_json(content)
        return b""

    async def _take_stats(self, content: bytes) -> bytes:
        self._stats = wire.STATS.validate_json(content)
        return b""

    async def _watch(self) -> None:
        ended = await self._channel.ended()
        self._lose(f"it {ended}")

    def _lose(self, cause: str) -> None:
        self._cause = self._cause or cause
        self._ready.put_nowait(None)

    def _finish_open(self, finish: FinishReason, problem: str) -> None:
        """An engine that is closed ends its requests; one that died does not, and its requests go on elsewhere."""
        if self._open and self._version is not None:
            version = self._version
            ended = tuple(Segment(name, (), (), version, version, finish, problem) for name in self._open)
            self._open.clear()
            self._ready.put_nowait(ended)

    def _check_alive(self) -> None:
        if self._cause:
            raise EngineLost(f"engine {self._id} is lost: {self._cause}")
        if self._closed:
            raise EngineError(f"engine {self._id} is closed")
