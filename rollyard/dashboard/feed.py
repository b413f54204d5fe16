"""What a run that goes on says of itself: asked through the socket in its folder, seldom, and kept."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Final

from rollyard.control import LOOK, Order, asked
from rollyard.errors import ConfigError
from rollyard.watch.heard import Lanes
from rollyard.watch.live import ASKED, LOOKED, Live, Look
from rollyard.watch.trace import Traced

FRESH_S: Final = 0.8  # seconds for which an answer is new enough
LIMIT_S: Final = 2.0  # for an answer; one that comes later is of no use
AGAIN_S: Final = 5.0  # after one that did not come
AT_ONCE: Final = 16  # looks in a row, while there is more to tell


class Feed:
    """One run, as it tells of itself while it goes on. Whoever asks within a second gets the same answer."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._lock = Lock()
        self._lanes = Lanes()
        self._live: Live | None = None
        self._due = -1.0
        self._life: float | None = None  # when it began, on its own clock: another one is another life

    def live(self) -> Live | None:
        """What it is at; None when it does not say."""
        with self._lock:
            self._refresh()
            return self._live

    def traced(self, *, ask: bool) -> Traced | None:
        """What its devices did, as far as it said; None when it never did. `ask`: it goes on, and may say more."""
        with self._lock:
            if ask:
                self._refresh()
            return None if self._life is None else self._lanes.traced()

    def _refresh(self) -> None:
        if self._clock() < self._due:
            return
        try:
            look = self._look()
            for _ in range(AT_ONCE - 1):
                if not look.news.more:
                    break
                look = self._look()
        except ConfigError:  # it is over, or busy with something that it does not let go of
            self._live, self._due = None, self._clock() + AGAIN_S
            return
        self._live, self._due = look.live, self._clock() + FRESH_S

    def _look(self) -> Look:
        known = ASKED.dump_json(self._lanes.known()).decode()
        look = asked(self._folder, Order(LOOK, known=known), LOOKED, LIMIT_S)
        if self._life not in (None, look.news.start_ns):  # another life: it does not know what the one before had told
            self._lanes = Lanes()
            self._life = None
            return self._look()
        self._life = look.news.start_ns
        self._lanes.take(look.news)
        return look
