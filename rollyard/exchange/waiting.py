"""Waiting for the other job: said in words, and never without an end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from rollyard.errors import ExchangeError
from rollyard.exchange.folder import Folder, Job

T = TypeVar("T")

POLL_S = (0.02, 0.5)  # seconds between two looks, at first and at most
TELL_S = 5.0  # seconds after which a wait is worth a word


class GivenUp(Exception):
    """Nobody wants to wait any more."""


class Waiting:
    """Looks into the folder until something is there.

    Args:
        folder: of the exchange.
        job: who waits.
        limit_s: seconds until it is given up.
    """

    def __init__(self, folder: Folder, job: Job, limit_s: float) -> None:
        self._folder, self._other, self._limit_s = folder, job.other, limit_s
        self.text = ""  # what is waited for, once that has gone on for a while
        self._cause = ""

    def give_up(self, cause: str) -> None:
        """End the wait that goes on, and any that begins."""
        self._cause = cause

    async def until(self, look: Callable[[], T | None], what: str) -> T:
        """The first that `look` finds. Raises ExchangeError when it finds nothing within the limit, GivenUp when that is wanted.

        Args:
            look: called on a thread; may raise.
            what: for messages, such as "version 3".
        """
        clock = asyncio.get_running_loop().time
        began, pause = clock(), POLL_S[0]
        try:
            while (found := await asyncio.to_thread(look)) is None:
                if self._cause:
                    raise GivenUp(self._cause)
                waited = clock() - began
                if waited > self._limit_s:
                    raise ExchangeError(await self._words(what, f"{self._limit_s:g} s are over"))
                if waited >= TELL_S:
                    self.text = await self._words(what, f"since {coarse(waited)}")
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, POLL_S[1])
            return found
        finally:
            self.text = ""

    async def _words(self, what: str, how_long: str) -> str:
        held, said = await asyncio.to_thread(self._folder.seats[self._other].look)
        state = "" if held else f" (it is not running{'; ' * bool(said)}{said})"
        return f"waiting for the {self._other} job: {what}, {how_long}{state}"


def coarse(seconds: float) -> str:
    """A time that is not another one at each look: to 5 s below a minute, then to 10 s, to a minute, to an hour."""
    for below, grain, unit, name in ((60, 5, 1, "s"), (600, 10, 1, "s"), (36_000, 60, 60, "min")):
        if seconds < below:
            return f"{int(seconds // grain * grain) // unit} {name}"
    return f"{int(seconds // 3600)} h"
