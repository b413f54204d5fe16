"""An asyncio event loop whose clock is virtual: nobody waits for a timer, the clock jumps to it.

So an hour of sleeping takes as long as what is computed in between, and gives the same result each time. Files, sockets and
threads work as ever; while `run_in_executor` has work under way the clock stands still.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Events = list[tuple[selectors.SelectorKey, int]]


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0. When nothing is ready it becomes the time of the next timer; without a timer the loop waits.

    Example: `asyncio.Runner(loop_factory=VirtualLoop).run(main())`, or `run(main())` of this module.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._outside = 0  # calls on threads that have not ended
        super().__init__(_Selector(self._idle))

    def time(self) -> float:
        """Seconds since the loop was made, had everybody waited for every timer."""
        return self._now

    def run_in_executor(self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts) -> asyncio.Future[T]:
        """As any loop does. The clock stands still until the call has ended."""
        future = super().run_in_executor(executor, func, *args)
        self._outside += 1
        future.add_done_callback(self._ended)
        return future

    def _ended(self, _: asyncio.Future[Any]) -> None:
        self._outside -= 1

    def _idle(self, seconds: float) -> bool:
        """Nothing is ready, and the next timer is due in so many seconds: jump there, unless a thread works."""
        if not self._outside:
            self._now += seconds
        return not self._outside


class _Selector(selectors.BaseSelector):
    """A real one that does not wait for time to pass.

    Args:
        idle: told how many seconds would have been waited; False when only files and threads may end the waiting.
    """

    def __init__(self, idle: Callable[[float], bool]) -> None:
        self._real, self._idle = selectors.DefaultSelector(), idle

    def select(self, timeout: float | None = None) -> Events:
        if timeout is None:
            return self._real.select(None)
        events = self._real.select(0)
        if events or timeout <= 0 or self._idle(timeout):
            return events
        return self._real.select(None)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run it to its end on a virtual clock of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
