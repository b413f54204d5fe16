"""Processes on a virtual clock: the run's own ends of all lines are the real ones, what they lead to lives in this process.

A process is killed with all that it had not sent; one that stands still takes nothing, does nothing and sends nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rollyard.place.actor import Actor, Hold
from rollyard.place.line import Host, Line, serve
from rollyard.place.mailed import Mailed, split


def nothing() -> None:
    """Nobody is told."""


HOP_S = 0.001  # seconds a frame takes
KILLED = "was ended by signal 9"


class Clockwork:
    """A process's clock: what it does takes longer when it is slowed, and for ever while it stands still."""

    def __init__(self) -> None:
        self.going = asyncio.Event()
        self.going.set()
        self.slowed = 1.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.slowed)
        await self.going.wait()

    async def hold(self, seconds: float, share: float) -> None:
        """See `chaos.victims.Victim`."""
        if share == 1:
            self.going.clear()
        else:
            self.slowed = 1 / (1 - share)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.going.set()
            self.slowed = 1.0


class Wire(Line):
    """One end of a line in memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.other: Wire | None = None
        self.frames: deque[bytes] = deque()
        self.filled = asyncio.Event()

    def _post(self, head: bytes, content: bytes) -> None:
        if self.other is not None and not self.lost:
            self.frames.append(head + content)
            self.filled.set()

    async def carry(self, clock: Clockwork) -> None:
        """Everything that is posted here arrives there, in order."""
        while True:
            await self.filled.wait()
            await asyncio.sleep(HOP_S)
            await clock.going.wait()
            while self.frames:
                frame = self.frames.popleft()
                with suppress(ValueError):
                    assert self.other is not None
                    self.other.take(frame)
            self.filled.clear()


class Process:
    """A child of the run (what `place.child.Child` is to it), and the host that runs there."""

    def __init__(self, name: str, host: Host, order: bytes) -> None:
        self.name, self.clock, self.alive, self.leave = name, Clockwork(), True, nothing
        self._near, self._far = Wire(name), Wire("the parent")
        self._near.other, self._far.other = self._far, self._near
        self._tasks = [
            asyncio.create_task(self._near.carry(self.clock)),
            asyncio.create_task(self._far.carry(self.clock)),
            asyncio.create_task(self._run(host, order)),
        ]

    @property
    def closed(self) -> bool:
        return not self.alive

    def handle(self, name: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        self._near.handle(name, handler)

    def ready(self) -> None:
        self._near.ready()

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        return await self._near.call(name, content, limit_s=limit_s)

    def tell(self, name: str, content: bytes = b"") -> None:
        self._near.tell(name, content)

    async def ended(self) -> str:
        return await self._near.ended()

    def kill(self) -> None:
        """What it had not sent is gone."""
        if self.alive:
            self.alive = False
            self.leave()
            self._far.other = None
            for task in (*self._tasks, *self._far._tasks):
                task.cancel()
            asyncio.get_running_loop().call_later(HOP_S, self._near.fail, KILLED)

    async def hold(self, seconds: float, share: float) -> None:
        await self.clock.hold(seconds, share)

    async def close(self) -> None:
        if self.alive:
            with suppress(Exception):
                self._near.tell("quit")
            await asyncio.wait(self._tasks[2:], timeout=1)
        self.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._near.close()
        await self._far.close()

    async def _run(self, host: Host, order: bytes) -> None:
        await serve(self._far, host, order)


class Hosted:
    """An actor of a cluster: the run has the real `place.actor.Actor`, which is told when the node is gone or silent."""

    def __init__(self, name: str, host: Host, order: bytes, silent_s: float) -> None:
        self.name, self.clock, self.alive, self.leave = name, Clockwork(), True, nothing
        self._line = Mailed("the run")
        self._gone = asyncio.Event()
        self._hosting = asyncio.create_task(serve(self._line, host, order))
        hold = Hold(self._take, self._fetch, self._pulse, self.kill, self._hurt, (ConnectionError,), lambda error: KILLED)
        self.actor = Actor(name, hold, {"pid": 0, "logs": []}, silent_s)

    async def _reached(self) -> None:
        await asyncio.sleep(HOP_S)
        if not self.clock.going.is_set():
            waits = [asyncio.ensure_future(self.clock.going.wait()), asyncio.ensure_future(self._gone.wait())]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for each in waits:
                    each.cancel()
        if not self.alive:
            raise ConnectionResetError

    async def _take(self, batch: bytes) -> None:
        await self._reached()
        with suppress(ValueError):
            for frame in split(batch):
                self._line.take(frame)

    async def _fetch(self) -> bytes:
        await self._reached()
        batch, gone = asyncio.ensure_future(self._line.batch()), asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait((batch, gone, self._hosting), timeout=10, return_when=asyncio.FIRST_COMPLETED)
            if self._hosting.done():
                self._line.end_because("ended")
            await self._reached()
            return batch.result() if batch.done() else b""
        finally:
            batch.cancel()
            gone.cancel()

    async def _hurt(self, seconds: float, share: float) -> None:
        raise AssertionError("it is hit by its clock")

    async def _pulse(self) -> None:
        await self._reached()

    def kill(self) -> None:
        if self.alive:
            self.alive = False
            self.leave()
            self._gone.set()
            for task in (self._hosting, *self._line._tasks):
                task.cancel()

    async def hold(self, seconds: float, share: float) -> None:
        await self.clock.hold(seconds, share)

    async def close(self) -> None:
        await self.actor.close()
        await asyncio.gather(self._hosting, return_exceptions=True)
        await self._line.close()
