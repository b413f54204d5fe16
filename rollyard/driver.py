"""The driver's own process: the inbox of what happened, and how seldom Python looks for cycles meanwhile."""

from __future__ import annotations

import asyncio
import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rollyard.events import Event, Scored, SegmentArrived

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


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """The collector of cycles looks less often: a quarter of the driver's time, for records that make no cycles."""
    before = gc.get_threshold()
    gc.set_threshold(*COLLECTING)
    try:
        yield
    finally:
        gc.set_threshold(*before)
