"""Threads for functions that may never return. Such a thread is given up and replaced; it does not keep the process."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rollyard.errors import ScoringError, TimeLimitExceeded


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call came to: a value, or the error it raised."""

    value: Any = None
    error: BaseException | None = None


Job = tuple[Callable[[], Any], "asyncio.Future[Outcome]", asyncio.AbstractEventLoop]
Inbox = queue.SimpleQueue[Job | None]


class Workers:
    """Daemon threads, made as they are needed.

    Args:
        most_lost: threads given up to calls that never end before the pool itself gives up.
    """

    def __init__(self, most_lost: int) -> None:
        self._most_lost = most_lost
        self._lost = 0
        self._idle: list[Inbox] = []

    async def call(self, limit_s: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
        """Call it on a thread. Whatever it raises is in the outcome.

        Raises:
            TimeLimitExceeded: it took longer than `limit_s` seconds; the thread is given up.
            ScoringError: too many threads were given up already.
        """
        if self._lost >= self._most_lost:
            raise ScoringError(f"{self._lost} judgements never ended; the reward function hangs")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome] = loop.create_future()
        inbox = self._idle.pop() if self._idle else _hire()
        inbox.put((partial(function, *args, **kwargs), future, loop))
        done: set[asyncio.Future[Outcome]] = set()
        try:
            done, _ = await asyncio.wait((future,), timeout=limit_s)
        finally:
            if done:
                self._idle.append(inbox)
            else:
                inbox.put(None)  # should the call return after all, its thread ends
        if not done:
            self._lost += 1
            raise TimeLimitExceeded(f"no verdict within {limit_s:g} s")
        return future.result()

    def close(self) -> None:
        for inbox in self._idle:
            inbox.put(None)
        self._idle.clear()


def _hire() -> Inbox:
    inbox: Inbox = queue.SimpleQueue()
    threading.Thread(target=_work, args=(inbox,), name="reward", daemon=True).start()
    return inbox


def _work(inbox: Inbox) -> None:
    while (job := inbox.get()) is not None:
        call, future, loop = job
        try:
            outcome = Outcome(value=call())
        except BaseException as error:  # noqa: BLE001 - it belongs to the caller, who finds it in the outcome
            outcome = Outcome(error=error)
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(_deliver, future, outcome)


def _deliver(future: asyncio.Future[Outcome], outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
