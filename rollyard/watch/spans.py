"""When a device does what: kept by the process that does it, told to the one that accounts for it."""

from __future__ import annotations

import asyncio
import platform
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Final, ParamSpec, Protocol, Self, TypeVar

from pydantic import TypeAdapter

from rollyard.errors import EngineLost
from rollyard.protocols.devices import Spans
from rollyard.protocols.processes import Channel
from rollyard.types import PROOFS, Activity, Interval

MESSAGE: Final = 4096  # intervals told at once, about 200 kB
KEPT: Final = 65536  # intervals, where nobody asks for them; the oldest go first
TELL_S: Final = 0.2  # seconds between two tellings
BOOT: Final = Path("/proc/sys/kernel/random/boot_id")  # of the machine, as long as its monotonic clock runs

WORK: Final = ((Activity.GENERATE, ""), (Activity.EVAL, ""), (Activity.SYNC, "probe"))  # of engines, the first counts first
FINEST_NS: Final = 1000  # gaps that are closed first where intervals are too many


class Timed(Protocol):
    """From when to when."""

    @property
    def start_ns(self) -> int: ...

    @property
    def end_ns(self) -> int: ...

    def _replace(self, *, end_ns: int) -> Self: ...


P = ParamSpec("P")
T = TypeVar("T")
Span = TypeVar("Span", bound=Timed)


@dataclass(frozen=True, slots=True)
class News:
    """What a process tells of its device. `sent_ns` is on its own machine's clock."""

    machine: str
    sent_ns: int
    intervals: tuple[Interval, ...]


NEWS: Final = TypeAdapter(News)


def coarser(intervals: list[Span], most: int, kind: Callable[[Span], Hashable]) -> list[Span]:
    """At most so many where that can be: of each kind, those with the shortest gaps between them become one."""
    gap = FINEST_NS
    while len(intervals) > most and gap < 2**62:
        newest: dict[Hashable, int] = {}
        joined: list[Span] = []
        for interval in intervals:
            at = newest.get(kind(interval))
            if at is not None and interval.start_ns - joined[at].end_ns <= gap:
                joined[at] = joined[at]._replace(end_ns=max(joined[at].end_ns, interval.end_ns))
            else:
                newest[kind(interval)] = len(joined)
                joined.append(interval)
        intervals, gap = joined, 2 * gap
    return intervals


class SpanLog:
    """What one device did (protocols.Spans). What goes on without a gap is one interval.

    Args:
        clock: nanoseconds of the monotonic clock.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.now = clock
        self._lock = Lock()  # a device's thread adds, the event loop drains
        self._done: deque[Interval] = deque(maxlen=KEPT)
        self._last: Interval | None = None

    def add(self, activity: Activity, start_ns: int, end_ns: int, what: str = "") -> None:
        """Something was done."""
        with self._lock:
            last = self._last
            if last is not None:
                if last.activity is activity and last.what == what and last.start_ns <= start_ns <= last.end_ns:
                    self._last = Interval(activity, last.start_ns, max(end_ns, last.end_ns), what)
                    return
                self._done.append(last)
            self._last = Interval(activity, start_ns, end_ns, what)

    @contextmanager
    def doing(self, activity: Activity, what: str = "") -> Iterator[None]:
        """The time of a block, also of one that raises."""
        start = self.now()
        try:
            yield
        finally:
            self.add(activity, start, self.now(), what)

    def timed(self, activity: Activity, call: Callable[P, T], what: str = "") -> Callable[P, T]:
        """The time of a call, where it happens: `device.run(spans.timed(Activity.TRAIN, step), batch)`."""

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with self.doing(activity, what):
                return call(*args, **kwargs)

        return run

    def drain(self) -> tuple[Interval, ...]:
        """What was added since the last time, at most MESSAGE intervals; one that goes on is continued by the next."""
        with self._lock:
            if self._last is not None:
                self._done.append(self._last)
                self._last = None
            return tuple(self._done.popleft() for _ in range(min(len(self._done), MESSAGE)))


class Burst:
    """Time in which an engine has work, tick by tick: what lies between two steps belongs to it too.

    Args:
        spans: where it is kept.
        clocks: seconds that are counted besides, such as those of processors.
    """

    __slots__ = ("_clocks", "_read", "_since", "_spans")

    def __init__(self, spans: Spans, clocks: Sequence[Callable[[], float]] = ()) -> None:
        self._spans, self._clocks = spans, clocks
        self._since: int | None = None
        self._read: list[float] = []

    def go(self) -> None:
        """There is work. Harmless when there was some before."""
        if self._since is None:
            self._since, self._read = self._spans.now(), [clock() for clock in self._clocks]

    def tick(self, activity: Activity, what: str = "") -> tuple[float, ...]:
        """All the time since the last tick was spent on `activity`: its seconds, and those of each clock. Empty at rest."""
        if self._since is None:
            return ()
        (since, read), self._since, self._read = (self._since, self._read), self._spans.now(), [clock() for clock in self._clocks]
        self._spans.add(activity, since, self._since, what)
        return (self._since - since) / 1e9, *(now - before for now, before in zip(self._read, read, strict=True))

    def rest(self) -> None:
        """There is no work, or it stands still: what comes until the next `go` is not counted."""
        self._since = None


def work_for(group: int) -> tuple[Activity, str]:
    """What an engine does that writes for this group, and which part of it.

    Of several the greatest group says it: rollouts count before evaluations, and these before canary and probes.
    """
    return WORK[0] if group >= 0 else WORK[1] if group > PROOFS else WORK[2]


def tell(spans: Spans, channel: Channel) -> None:
    """Send what is new. An answer that is given after this arrives after it."""
    while new := spans.drain():
        channel.tell("spans", NEWS.dump_json(News(_machine(), time.monotonic_ns(), new)))


@asynccontextmanager
async def telling(spans: Spans, channel: Channel) -> AsyncIterator[None]:
    """Send what is new a few times a second, as long as the block lasts and the line holds."""

    async def keep_telling() -> None:
        with suppress(EngineLost):
            while True:
                await asyncio.sleep(TELL_S)
                tell(spans, channel)

    task = asyncio.create_task(keep_telling())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def hear(channel: Channel, spans: SpanLog | None = None) -> SpanLog:
    """What the process at the other end tells of its device, added to `spans`. Call it before `channel.ready()`.

    The clock of another machine is set to this one's by the message that was under way for the shortest time: what that
    machine did is late by that time.
    """
    spans = SpanLog() if spans is None else spans
    shift: int | None = None  # nanoseconds

    async def take(content: bytes) -> bytes:
        nonlocal shift
        news = NEWS.validate_json(content)
        if news.machine == _machine():
            shift = 0
        elif shift is None or time.monotonic_ns() - news.sent_ns < shift:
            shift = time.monotonic_ns() - news.sent_ns
        for activity, start, end, what in news.intervals:
            spans.add(activity, start + shift, end + shift, what)
        return b""

    channel.handle("spans", take)
    return spans


@cache
def _machine() -> str:
    try:
        return BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
