"""Doubles of worker processes, for pools: no process is started."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from rollyard.errors import EngineLost, TimeLimitExceeded

Handle = Callable[[str, bytes], Awaitable[bytes]]


class Died(Exception):
    """What a double raises that ends its process."""


class Hung(Exception):
    """What a double raises in the place of an answer that never comes: its time limit is over at once."""


class FakeProcess:
    """A process in name only: it answers with `handle`, hangs when that does, and dies of Died."""

    def __init__(self, name: str, handle: Handle) -> None:
        self.name, self._handle = name, handle
        self.alive, self.calls, self.killed, self.closed = True, 0, False, False
        self._end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def handle(self, name: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None: ...

    def ready(self) -> None: ...

    def tell(self, name: str, content: bytes = b"") -> None: ...

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        self.calls += name != "start"
        answer = asyncio.ensure_future(self._handle(name, content))
        done, _ = await asyncio.wait((answer, self._end), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if answer in done and isinstance(answer.exception(), Died):
            self.end(f"died of {answer.exception()}")
        elif answer in done and not isinstance(answer.exception(), Hung):
            return answer.result()
        answer.cancel()
        if self._end.done():
            raise EngineLost(f"{self.name} {self._end.result()}")
        raise TimeLimitExceeded(f"{self.name} did not answer {name} within {limit_s:g} s")

    async def ended(self) -> str:
        return await asyncio.shield(self._end)

    def end(self, cause: str) -> None:
        if not self._end.done():
            self._end.set_result(cause)

    def kill(self) -> None:
        self.killed = True
        self.end("was ended by signal 9")

    async def close(self) -> None:
        self.closed = True
        self.end("was closed")


class FakeLauncher:
    """Starts doubles.

    Args:
        handle: what each answers.
        fails: what it raises instead of starting one.
    """

    def __init__(self, handle: Handle, fails: Exception | None = None) -> None:
        self.handle, self.fails = handle, fails
        self.started: list[FakeProcess] = []

    async def launch(
        self, target: str, order: bytes, *, name: str, environment: Mapping[str, str], python: Path | None = None
    ) -> FakeProcess:
        if self.fails is not None:
            raise self.fails
        self.started.append(FakeProcess(name, self.handle))
        return self.started[-1]
