"""Stations that answer at once: what is left of a run is its orchestration.

Everything else is the real one: loop, conductor, core, router, rollover, controller, advantages, packing, journal, report.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from rollyard.bench.doubles import WINDOW, DoublePublisher, DoubleTrainer, Endless, Immediate, Meter
from rollyard.errors import EngineLost, RequestRejected
from rollyard.events import EngineId, Rollover, WakePart
from rollyard.protocols.rollouts import Engine, Scorer
from rollyard.protocols.weights import Evidence
from rollyard.stations import Stations
from rollyard.types import Capabilities, EngineStats, FinishReason, Manifest, Request, RequestId, Segment, WeightVersion
from rollyard.watch.spans import SpanLog

TOKENS = 16  # of a completion
IDLE_S = 0.05  # without a new request an engine that holds some gives all of them
IDS, LOGPROBS = (1,) * TOKENS, (-0.5,) * TOKENS
CAN = Capabilities(keep=True, sleep=True, transports=("in_place",))

Fate = Callable[[Request], str]  # what becomes of a request: "" for its completion, or a failure


@dataclass(slots=True)
class Flight:
    """Requests that engines hold, all together."""

    now: int = 0
    most: int = 0
    seen: int = 0  # sum over all that were handed out, of what was held by then
    handed: int = 0

    def took(self, count: int) -> None:
        self.now += count
        self.most = max(self.most, self.now)
        self.seen += self.now * count
        self.handed += count

    @property
    def mean(self) -> float:
        """As a request that is handed out finds it."""
        return self.seen / max(self.handed, 1)


@dataclass(slots=True)
class InstantEngine:
    """Writes a whole completion in no time (protocols.Engine).

    Args:
        id: its name.
        slots: requests that it takes at once.
        hold: it answers the oldest sixteenth of what it may have once its slots are full, and the rest when nothing more comes.
        flight: counts what it holds.
        fate: "" or how a request fails: "error" (an answer that says so), "death" (of the engine), "refusal".
    """

    id: EngineId
    slots: int
    flight: Flight
    hold: bool = False
    fate: Fate | None = None
    version: WeightVersion | None = None
    spans: SpanLog = field(default_factory=SpanLog)
    capabilities: Capabilities = CAN
    _held: deque[Request] = field(default_factory=deque)
    _ready: asyncio.Queue[tuple[Segment, ...] | None] = field(default_factory=asyncio.Queue)
    _offered: WeightVersion | None = None
    _new: bool = False  # requests came since it last looked
    _watch: asyncio.TimerHandle | None = None
    _cause: str = ""
    _written: int = 0

    async def start(self) -> None:
        """It is ready."""

    def generate(self, requests: Sequence[Request]) -> None:
        """Raises RequestRejected for one that is to be refused, EngineLost once it died."""
        if self._cause:
            raise EngineLost(self._cause)
        if self.fate is not None and any(self.fate(request) == "refusal" for request in requests):
            raise RequestRejected("it was told to refuse")
        self.flight.took(len(requests))
        self._held.extend(requests)
        if not self.hold:
            self._answer(len(self._held))
        elif len(self._held) >= self.slots:
            self._answer(max(self.slots // 16, 1))
        self._new = True
        if self._held and self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(IDLE_S, self._look)

    def _look(self) -> None:
        self._watch = None
        if not self._new:
            self._answer(len(self._held))
        self._new = False
        if self._held:
            self._watch = asyncio.get_running_loop().call_later(IDLE_S, self._look)

    def _answer(self, count: int) -> None:
        """Give the oldest `count` of what it holds."""
        self._give(tuple(segment for segment in (self._segment(self._held.popleft()) for _ in range(count)) if segment))

    def _segment(self, request: Request) -> Segment | None:
        assert self.version is not None
        fate = self.fate(request) if self.fate is not None else ""
        if fate == "death" and not self._cause:
            self._cause = f"engine {self.id} is lost: request {tuple(request.id)} was to end it"
        if self._cause:
            self.flight.now -= 1
            return None
        if fate == "error":
            return Segment(request.id, (), (), self.version, self.version, FinishReason.ERROR, "it was told to fail")
        self._written += TOKENS
        return Segment(request.id, IDS, LOGPROBS, self.version, self.version, FinishReason.STOP)

    def _give(self, segments: tuple[Segment, ...]) -> None:
        if self._cause:
            self.flight.now -= len(self._held) + len(segments)
            self._held.clear()
            self._ready.put_nowait(None)
        elif segments:
            self.flight.now -= len(segments)
            self._ready.put_nowait(segments)

    async def segments(self) -> AsyncIterator[tuple[Segment, ...]]:
        """Raises EngineLost once it died."""
        while (segments := await self._ready.get()) is not None:
            yield segments
        if self._cause:
            raise EngineLost(self._cause)

    async def abort(self, requests: Sequence[RequestId]) -> None:
        names, kept = set(requests), list(self._held)
        self._held = deque(request for request in kept if request.id not in names)
        version = self.version or WeightVersion(0)
        cut = [request.id for request in kept if request.id in names]
        self._give(tuple(Segment(each, (), (), version, version, FinishReason.ABORT) for each in cut))

    async def pause(self, rollover: Rollover) -> None:
        """What it holds it has not begun."""
        if rollover is Rollover.DRAIN:
            self._answer(len(self._held))

    async def prepare(self, manifest: Manifest) -> None:
        self._offered = manifest.version

    async def load(self, version: WeightVersion) -> None:
        self.version = version

    async def resume(self) -> None:
        """It never stood still."""

    async def sleep(self) -> None:
        """It has no memory to give back."""

    async def wake(self, part: WakePart) -> None:
        """It has nothing to take again."""

    def stats(self) -> EngineStats:
        return EngineStats(generated_tokens=self._written, slots=self.slots)

    def condemn(self, cause: str) -> None:
        self._cause = self._cause or cause
        self._give(())

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._ready.put_nowait(None)


def instant_stations(engines: int, slots: int, flight: Flight, *, hold: bool = False, fate: Fate | None = None) -> Stations:
    """Some engines that answer at once, and a trainer and a judge that do.

    Args:
        engines: how many.
        slots: of each.
        flight: counts what they hold.
        hold: see `InstantEngine`.
        fate: see `InstantEngine`; an engine that dies can be started again.
    """

    def made(name: EngineId) -> InstantEngine:
        return InstantEngine(name, slots, flight, hold, fate)

    async def launch(name: EngineId, url: str) -> Engine:
        return made(name)

    names = [f"engine-{number}" for number in range(engines)]
    return Stations(
        source=Endless(),
        held_out=(),
        scorer=cast(Scorer, Immediate()),
        text=lambda ids, stop, finish: "",
        window=WINDOW,
        size=0,
        engines={name: made(name) for name in names},
        trainers={None: DoubleTrainer(0.0, Meter())},
        ranks=1,
        publishers=dict.fromkeys(names, DoublePublisher()),
        evidence=cast(Evidence, object()),  # canary and probe are off: nobody asks it
        handoffs={},
        starts=(),
        launch=None if fate is None else launch,
    )
