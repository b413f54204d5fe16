"""A line between two processes over a socket (protocols.Channel): calls, answers and errors as JSON, never pickle.

A frame is its length (4 bytes), a head of one line of JSON, and the content as it is. Heads:

    {"call": NAME, "id": N}     a call; without "id" nobody waits for an answer
    {"answer": N}               the answer; the content is the result
    {"answer": N, "error": CLASS, "retryable": BOOL}    the content is the message
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from rollyard import errors
from rollyard.errors import ConfigError, EngineLost, RollyardError, TimeLimitExceeded

SIZE = struct.Struct("<I")
LIMIT = 2**30  # bytes of a frame at most
Handler = Callable[[bytes], Awaitable[bytes]]


class Link:
    """One end. `open` starts reading."""

    def __init__(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name = name
        self._reader, self._writer = reader, writer
        self._handlers: dict[str, Handler] = {}
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ready = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to read. Handlers should be there by now."""
        self._reading = asyncio.create_task(self._read(), name=f"link {self.name}")

    def handle(self, name: str, handler: Handler) -> None:
        """Answer calls of this name. Calls are answered as their handlers end, not in their order."""
        self._handlers[name] = handler

    def ready(self) -> None:
        """All handlers are there: a call of another name is a mistake from now on, and waits no longer."""
        self._ready.set()

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        """The answer of the other end.

        Raises:
            RollyardError: what the other end raised, as the class it was.
            TimeLimitExceeded: no answer within `limit_s` seconds.
            EngineLost: the other end is gone.
        """
        self._check_open()
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"call": name, "id": number}, content)
            async with asyncio.timeout(limit_s):
                answer: bytes = await waiting
                return answer
        except TimeoutError:
            raise TimeLimitExceeded(f"{self.name} did not answer {name} within {limit_s:g} s") from None
        finally:
            del self._waiting[number]

    def tell(self, name: str, content: bytes = b"") -> None:
        """A call that nobody waits for. Raises EngineLost when the other end is gone."""
        self._check_open()
        self._send({"call": name}, content)

    async def ended(self) -> str:
        """Wait for the end of the line; its cause."""
        return await asyncio.shield(self._cause)

    def fail(self, cause: str) -> None:
        """The other end is gone: nobody waits for it any longer."""
        if not self._cause.done():
            self._cause.set_result(cause)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(EngineLost(f"{self.name} {cause}"))

    async def close(self) -> None:
        for task in (self._reading, *self._tasks):
            if task is not None and task is not asyncio.current_task():
                task.cancel()
        self.fail("was closed")
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _read(self) -> None:
        try:
            while True:
                size = SIZE.unpack(await self._reader.readexactly(SIZE.size))[0]
                head, _, content = (await self._reader.readexactly(size)).partition(b"\n")
                self._take(json.loads(head), content)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.fail("ended")

    def _take(self, head: dict[str, Any], content: bytes) -> None:
        if "call" in head:
            task = asyncio.create_task(self._answer(head, content))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return
        waiting = self._waiting.get(head["answer"])
        if waiting is None or waiting.done():
            return  # whoever asked has given up
        if "error" in head:
            waiting.set_exception(_error(head["error"], content.decode(), bool(head["retryable"])))
        else:
            waiting.set_result(content)

    async def _answer(self, head: dict[str, Any], content: bytes) -> None:
        name, number = head["call"], head.get("id")
        try:
            if name not in self._handlers:
                await self._ready.wait()
            handler = self._handlers.get(name)
            if handler is None:
                raise RollyardError(f"{self.name} was asked for {name}, which it does not know")
            result = await handler(content)
        except Exception as error:
            if number is None:
                raise
            self._send(
                {"answer": number, "error": type(error).__name__, "retryable": getattr(error, "retryable", False)},
                (str(error) if isinstance(error, RollyardError) else f"{type(error).__name__}: {error}").encode(),
            )
            return
        if number is not None:
            self._send({"answer": number}, result)

    def _send(self, head: dict[str, object], content: bytes) -> None:
        line = json.dumps(head).encode() + b"\n"
        if len(line) + len(content) > LIMIT:
            raise RollyardError(f"{self.name}: a message of {len(content)} bytes is more than {LIMIT}")
        if not self._writer.is_closing():
            self._writer.write(SIZE.pack(len(line) + len(content)) + line + content)

    def _check_open(self) -> None:
        if self._cause.done():
            raise EngineLost(f"{self.name} {self._cause.result()}")


def _error(name: str, message: str, retryable: bool) -> RollyardError:
    """The error that the other end raised; one of a class that is not ours is a RollyardError."""
    kind = getattr(errors, name, RollyardError)
    if not (isinstance(kind, type) and issubclass(kind, RollyardError)) or kind is ConfigError:
        kind = RollyardError
    error: RollyardError = kind(message)
    error.retryable = retryable
    return error
