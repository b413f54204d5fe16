"""Virtual time (PURE): what is due at once is done in turn, and then the clock jumps to what is due next.

The order at one moment is that of an event loop, so that the simulator's is the real loop's: first asked, first done, and what
takes no time but somebody's attention waits its turn behind what was asked before. What is due at the very same later moment is
done in the order in which it was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from rollyard.errors import ConfigError

SHORTER = "use fewer, or costs and devices with which they take less"
Call = Callable[[], None]

LATEST = 1e8  # seconds, three years: a later moment is not told from the next any more
TOGETHER = 1e-9  # seconds within which things are due at the same moment


class Clock:
    """Seconds, from 0 on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self.beside = 0  # of what is due later: what nobody waits for
        self._ready: deque[Call] = deque()
        self.soon: Callable[[Call], None] = self._ready.append  # do it at this moment, after what is asked for already
        self._timers: list[tuple[float, int, Call]] = []
        self._order = count()

    @property
    def nanoseconds(self) -> int:
        return int(self.now * 1e9)

    @property
    def due(self) -> bool:
        """Is anything more to be done at this moment?"""
        return bool(self._ready)

    def turns(self, call: Call, turns: int) -> None:
        """Do it at this moment, after what is asked for already; with 2 turns also after what comes of that, and so on."""
        self.soon(call if turns == 1 else lambda: self.turns(call, turns - 1))

    def after(self, seconds: float, call: Call) -> None:
        """Do it in so many seconds; without any, soon."""
        if seconds > 0:
            self.at(self.now + seconds, call)
        else:
            self.soon(call)

    def at(self, when: float, call: Call) -> None:
        """Do it at that time, or now where that is past."""
        heappush(self._timers, (when, next(self._order), call))

    def run(self, still: Call) -> None:
        """Until `stopped`. `still` is called whenever nothing more is to be done at the moment.

        Raises:
            ConfigError: what is to come is later than LATEST.
            AssertionError: everybody waits for somebody else.
        """
        ready, timers, first = self._ready, self._timers, self._ready.popleft
        while not self.stopped:
            if ready:
                first()()
                continue
            still()
            if ready:
                continue
            assert len(timers) > self.beside, f"nothing is under way after {self.now:.6g} s, and it is not over"
            if timers[0][0] > LATEST:
                raise ConfigError(f"the run would go on for more than {LATEST:,.0f} s", where="run.steps", remedy=SHORTER)
            if timers[0][0] > self.now:
                self.now = timers[0][0]
            limit = self.now + TOGETHER
            while timers and timers[0][0] <= limit:
                ready.append(heappop(timers)[2])
