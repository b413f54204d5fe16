"""The driver's own process: the inbox of what happened, orders that have their turn, cycles that Python looks for, its end."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Final

from rollyard.events import EngineDown, EngineId, EngineLeaving, Event, Scored, SegmentArrived
from rollyard.texts import visible

NEWS: Final = (SegmentArrived, Scored)  # that come by the thousand, and are taken together
TOGETHER: Final = 256  # at most
COLLECTING: Final = (10_000, 20, 50)  # records made, and looks at younger ones, between two looks (Python's own: 700, 10, 10)


class News:
    """What happened and was not looked at yet, in order; also what broke."""

    def __init__(self) -> None:
        self._events: deque[Event | BaseException] = deque()

    def __bool__(self) -> bool:
        return bool(self._events)

    def put_nowait(self, event: Event | BaseException) -> None:
        self._events.append(event)

    def next(self) -> list[Event]:
        """The next event: news of rollouts with what other news came right after it, anything else by itself.

        There must be one. Raises what broke, in its turn.
        """
        events = self._events
        first = events.popleft()
        if isinstance(first, BaseException):
            raise first
        taken = [first]
        while type(first) in NEWS and events and len(taken) < TOGETHER:
            follower = events[0]
            if isinstance(follower, BaseException) or type(follower) not in NEWS:
                break
            taken.append(follower)
            events.popleft()
        return taken


class Inbox(News):
    """News that may be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self._came = asyncio.Event()

    def put_nowait(self, event: Event | BaseException) -> None:
        super().put_nowait(event)
        self._came.set()

    async def take(self) -> list[Event]:
        """See `next`, which this waits for."""
        while not self:
            self._came.clear()
            await self._came.wait()
        return self.next()


class Leaving:
    """Orders that engines leave, each of which has its turn among the events.

    Args:
        staying: engines that are up and were not told to leave.
        stays: told of one that stays after all when its turn has come, and why.
    """

    def __init__(self, staying: Callable[[], Set[EngineId]], stays: Callable[[EngineId, str], None]) -> None:
        self._staying, self._stays = staying, stays
        self._ordered: dict[EngineId, EngineLeaving] = {}  # what has yet to have its turn
        self.engines: set[EngineId] = set()  # that were ordered to leave, and have not left

    def order(self, engine: EngineId, cut: bool) -> EngineLeaving:
        """The event of it."""
        self.engines.add(engine)
        order = self._ordered[engine] = EngineLeaving(engine, cut)
        return order

    def left(self, engine: EngineId) -> None:
        self.engines.discard(engine)

    def turns(self, event: Event) -> Sequence[Event]:
        """What this becomes now. That an engine is to leave comes before the news that it is lost: it is not started again."""
        if not isinstance(event, EngineLeaving | EngineDown):
            return (event,)
        order = self._ordered.pop(event.engine, None)
        leaves = (order,) if order is not None and self._may_leave(order.engine) else ()
        return leaves if isinstance(event, EngineLeaving) else (*leaves, event)

    def _may_leave(self, engine: EngineId) -> bool:
        """May it still, now that its turn has come? Others may have been lost meanwhile."""
        staying = self._staying()
        if engine in staying and len(staying) > 1:
            return True
        self.engines.discard(engine)
        self._stays(
            engine, "the others were lost meanwhile" if engine in staying else "it was lost just then, and is started again"
        )
        return False


@contextmanager
def collecting_seldom(thresholds: tuple[int, int, int] = COLLECTING) -> Iterator[None]:
    """The collector of cycles looks less often: a quarter of the driver's time, for records that make no cycles."""
    before = gc.get_threshold()
    gc.set_threshold(*thresholds)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def warned(kind: type[Exception], told: str = "") -> Iterator[None]:
    """The rest is closed all the same, and what ended the run is what is raised. What was `told` already is not said again."""
    try:
        yield
    except kind as error:
        if str(error) not in told:
            warnings.warn(visible(f"closing the run: {type(error).__name__}: {error}"), RuntimeWarning, stacklevel=3)
