"""The run's end of the line to an actor of a cluster.

    the run   Actor ── take(batch) ──► Body    in the actor's process: runs the target, or a child with its own Python
              Actor ◄── fetch() ────── Body    a long poll: answered as soon as there is something
              Actor ◄── pulse() ────── Body    on a thread of its own: a node that is cut off is silent, and nobody says so

What crosses are the frames of `line`, all that wait at once, as bytes; no error is ever pickled. One batch is under way in
each direction at a time, which keeps the order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rollyard.errors import EngineLost
from rollyard.place.body import printed
from rollyard.place.mailed import Mailed

QUIT_S = 10.0  # seconds a host may take to end by itself
GONE_S = 5.0  # seconds that the cluster may take to end a process
PULSE_S = 1.0  # seconds between two signs of life
PARTS = 10  # of the time that an actor may be silent


@dataclass(frozen=True, slots=True)
class Hold:
    """How the run reaches a `Body`: its calls, and what they raise when it is gone, or the way to it."""

    take: Callable[[bytes], Awaitable[None]]
    fetch: Callable[[], Awaitable[bytes]]
    pulse: Callable[[], Awaitable[None]]
    kill: Callable[[], None]
    hurt: Callable[[float, float], Awaitable[None]]
    failures: tuple[type[Exception], ...]
    reason: Callable[[Exception], str]


class OnItsNode:
    """An actor's process as faults on purpose see it (chaos.victims.Victim): it hurts itself, wherever it is.

    Args:
        hold: how it is reached.
    """

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._killing: asyncio.Task[None] | None = None

    def kill(self) -> None:
        self._killing = asyncio.create_task(self._hurt(0.0, 1.0))

    async def hold(self, seconds: float, share: float) -> None:
        await self._hurt(seconds, share)
        await asyncio.sleep(seconds)

    async def _hurt(self, seconds: float, share: float) -> None:
        with suppress(*self._hold.failures):  # it is gone, as it was to be
            await self._hold.hurt(seconds, share)


class Actor:
    """A running actor and the line to it (protocols.Channel).

    Args:
        name: for messages.
        hold: how it is reached.
        facts: what `Body.begin` told.
        silent_s: seconds without a sign of life after which it counts as lost.
    """

    def __init__(self, name: str, hold: Hold, facts: Mapping[str, Any], silent_s: float) -> None:
        self.name = name
        self.pid: int = facts["pid"]  # on its node
        self._hold, self._logs, self._silent_s = hold, facts["logs"], silent_s
        self.victim = OnItsNode(hold)
        self._line = Mailed(name, self.said)
        self._closed = False
        self._carrying = asyncio.create_task(self._carry(), name=f"actor {name}")

    @property
    def lost(self) -> bool:
        """It hosts nothing any more."""
        return self._line.lost

    def handle(self, name: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._line.handle(name, handler)

    def ready(self) -> None:
        self._line.ready()

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        return await self._line.call(name, content, limit_s=limit_s)

    def tell(self, name: str, content: bytes = b"") -> None:
        self._line.tell(name, content)

    async def ended(self) -> str:
        return await self._line.ended()

    def fail(self, cause: str) -> None:
        """It is known to be gone."""
        self._line.fail(cause)

    async def close(self) -> None:
        """Let it end by itself for a while, then end it. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        try:
            with suppress(EngineLost):
                self._line.tell("quit")
                await asyncio.wait((self._carrying,), timeout=QUIT_S)
        finally:
            self.kill()
            await asyncio.wait((self._carrying,), timeout=GONE_S)
            self._carrying.cancel()
            await self._line.close()

    def kill(self) -> None:
        """At once, with what it started; once it can be reached, where it cannot be now."""
        self._hold.kill()

    def said(self) -> str:
        """The end of what it printed, or where that is."""
        return printed(self._logs)

    async def _carry(self) -> None:
        beside = [asyncio.create_task(self._send()), asyncio.create_task(self._feel())]
        try:
            while not self.lost:
                self._line.take_batch(await self._hold.fetch())
            self.kill()
            async with asyncio.timeout(GONE_S):
                await self._hold.fetch()
        except TimeoutError:
            pass
        except self._hold.failures as error:
            self._line.fail(f"died: {self._hold.reason(error)}{self.said()}")
        finally:
            for task in beside:
                task.cancel()

    async def _send(self) -> None:
        try:
            while True:
                await self._hold.take(await self._line.batch())
        except self._hold.failures as error:
            self._line.fail(f"died: {self._hold.reason(error)}{self.said()}")

    async def _feel(self) -> None:
        """Calls to a node that is cut off neither end nor fail until the cluster gives the node up, and that may take long."""
        try:
            while not self.lost:
                if not await self._felt():
                    self._line.fail(f"was silent for {self._silent_s:g} s")
                    self.kill()
                    self._carrying.cancel()
                    return
                await asyncio.sleep(PULSE_S)
        except self._hold.failures as error:
            self._line.fail(f"died: {self._hold.reason(error)}{self.said()}")

    async def _felt(self) -> bool:
        """In parts: a run whose own event loop stood still for long has missed one of them, and hears the answer then."""
        pulse = asyncio.ensure_future(self._hold.pulse())
        for _ in range(PARTS):
            if (await asyncio.wait((pulse,), timeout=self._silent_s / PARTS))[0]:
                pulse.result()
                return True
        pulse.cancel()
        return False
