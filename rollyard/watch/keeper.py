"""Keeps the timeline of a run in its folder while it goes on (`watch.kept`), for whoever looks after it was killed.

The file is made anew every few seconds on a thread of its own, and takes a small share of the time: what is new since the last
time is added to what is there, in a bounded number of intervals.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rollyard.errors import JournalError
from rollyard.texts import visible
from rollyard.watch.accounts import Accounts
from rollyard.watch.heard import Lanes
from rollyard.watch.kept import EMPTY, MOST, coarse, read_kept, write_kept
from rollyard.watch.live import News
from rollyard.watch.slots import Stretch

EVERY_S: Final = 5.0  # that the file is behind at most, where that takes a small share of the time
YOUNG: Final = 8  # times as long as it is behind, a run goes on at its beginning
RESTS: Final = 500  # times as long as it takes processors to make the file, it is left as it is


class Keeper:
    """Of one life.

    Args:
        clock: seconds; of the machine, also where that of the run is virtual: what it takes is real.
    """

    def __init__(self, path: Path, accounts: Accounts, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._accounts, self._clock = path, accounts, clock
        self._lanes = Lanes(MOST)
        self._earlier = EMPTY
        self._began: float | None = None
        self._due = 0.0
        self._writing: asyncio.Future[float] | None = None
        self._told = False  # that it cannot be written

    def begin(self) -> None:
        """This life has begun. What is there of earlier ones stays in front of it."""
        self._began = self._clock()
        try:
            kept = read_kept(self._path)
        except (OSError, JournalError) as error:
            self._warn(f"what earlier lives did is lost: {error}")
            return
        if kept is not None:
            self._earlier = coarse(kept.traced)

    def keep(self) -> None:
        """To be called often, on the loop: now and then it begins to write."""
        if self._writing is not None and self._writing.done():
            self._written(self._writing)
        now = self._clock()
        if self._began is None or self._writing is not None or now < self._due:
            return
        began = time.thread_time()
        news, slots = self._news(), self._accounts.slots.stretches()
        spent = time.thread_time() - began
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._write, news, slots, spent))

    def _written(self, writing: asyncio.Future[float]) -> None:
        self._writing, now = None, self._clock()
        assert self._began is not None
        self._due = now + min(EVERY_S, (now - self._began) / YOUNG)
        try:
            self._due = max(self._due, now + RESTS * writing.result())
        except OSError as error:
            self._due = now + EVERY_S
            if not self._told:
                self._told = True
                self._warn(f"it is not kept, which is tried again: {error}")

    async def close(self, trace: Path) -> None:
        """The life is over: its trace, and the last of what is kept. Raises OSError."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))
            self._written(self._writing)
        if self._began is None:
            self.begin()
        news, whole = self._news(), False
        try:
            self._accounts.write_trace(trace)
            whole = True
        finally:
            self._write(news, self._accounts.slots.stretches(), whole=whole)

    def _news(self) -> News:
        """All that there is beyond what was taken."""
        return self._accounts.tell(self._lanes.known(), 2**30)

    def _write(self, news: News, slots: Sequence[Stretch], spent: float = 0.0, *, whole: bool = False) -> float:
        """Returns seconds of processors, with those that were spent before."""
        began = time.thread_time()
        self._lanes.take(news)
        write_kept(self._path, self._earlier, self._lanes.traced(slots), whole=whole)
        return spent + time.thread_time() - began

    def _warn(self, told: str) -> None:
        warnings.warn(visible(f"the timeline in {self._path}: {told}"), RuntimeWarning, stacklevel=3)
