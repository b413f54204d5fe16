"""A line between two processes over a socket (protocols.Channel): calls, answers and errors as JSON, never pickle.

A frame is its length (4 bytes), a head of one line of JSON, and the content as it is. Heads:

    {"call": NAME, "id": N}     a call; without "id" nobody waits for an answer
    {"answer": N}               the answer; the content is the result
    {"answer": N, "error": CLASS, "retryable": BOOL}    the content is the message
    {"end": true, "error": CLASS, "retryable": BOOL}    the last frame: whoever waits gets this error

An error that is a user's mistake also has "where" and "remedy" in its head.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from rollyard import errors
from rollyard.errors import ConfigError, EngineLost, RollyardError, TimeLimitExceeded

SIZE = struct.Struct("<I")
LIMIT = 2**30  # bytes of a frame at most
FLUSH_S = 2.0  # seconds that what was sent last may take to go out
Handler = Callable[[bytes], Awaitable[bytes]]


class Link:
    """One end. `open` starts reading.

    Handlers begin in the order in which their calls came, and before an answer that came after them is handed on: what a
    handler does before its first wait is done by then.

    Args:
        name: of the other end, for messages.
        reader, writer: the socket.
        find_cause: once the other end is gone, finds out why.
    """

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        find_cause: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self.name = name
        self._reader, self._writer, self._find_cause = reader, writer, find_cause
        self._handlers: dict[str, Handler] = {}
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._error: RollyardError | None = None  # what the other end ended with
        self._ready = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to read. Handlers should be there by now."""
        self._reading = asyncio.create_task(self._read(), name=f"link {self.name}")

    def handle(self, name: str, handler: Handler) -> None:
        """Answer calls of this name. Calls are answered as their handlers end, not in their order.

        An error in a call that nobody waits for fails the line: what it was to do is missing from now on.
        """
        self._handlers[name] = handler

    def ready(self) -> None:
        """All handlers are there: a call of another name is a mistake from now on, and waits no longer."""
        self._ready.set()

    @property
    def lost(self) -> bool:
        """Nothing will come any more."""
        return self._cause.done()

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        """The answer of the other end.

        Raises:
            RollyardError: what the other end raised, as the class it was.
            TimeLimitExceeded: no answer within `limit_s` seconds.
            EngineLost: the other end is gone.
        """
        if self.lost:
            raise self._error or self._gone()
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
        if self.lost:
            raise self._gone()
        self._send({"call": name}, content)

    def end(self, error: RollyardError) -> None:
        """Tell the other end that this one ends with `error`: whoever waits there gets it."""
        head, content = _packed(error)
        self._send({"end": True, **head}, content)

    async def ended(self) -> str:
        """Wait for the end of the line; its cause."""
        return await asyncio.shield(self._cause)

    def fail(self, cause: str, error: RollyardError | None = None) -> None:
        """The other end is gone: nobody waits for it any longer. Only the first cause is kept."""
        if not self.lost:
            self._cause.set_result(cause)
            self._error = error
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._error or self._gone())

    async def close(self) -> None:
        """Send what is still to be sent, and let go of the socket. Closing twice is harmless."""
        tasks = [task for task in (self._reading, *self._tasks) if task is not None and task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=FLUSH_S)
        self.fail("was closed")
        self._writer.close()
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._writer.wait_closed()
        except TimeoutError:  # the other end is there and does not read
            self._writer.transport.abort()
        except ConnectionError:
            pass

    async def _read(self) -> None:
        try:
            while True:
                size = SIZE.unpack(await self._reader.readexactly(SIZE.size))[0]
                if size > LIMIT:
                    raise ValueError(f"a message of {size} bytes is more than {LIMIT}")
                head, _, content = (await self._reader.readexactly(size)).partition(b"\n")
                self._take(json.loads(head), content)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.fail("ended" if self._find_cause is None else await self._find_cause())
        except (ValueError, KeyError, TypeError) as error:
            self.fail(f"sent what is no message: {type(error).__name__}: {error}")

    def _take(self, head: dict[str, Any], content: bytes) -> None:
        if "call" in head:
            task = asyncio.create_task(self._answer(head["call"], head.get("id"), content))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif "end" in head:
            error = _unpacked(head, content)
            self.fail(f"ended: {error}", error)
        else:
            waiting = self._waiting.get(head["answer"])
            if waiting is None or waiting.done():
                return  # whoever asked has given up
            if "error" in head:
                waiting.set_exception(_unpacked(head, content))
            else:
                waiting.set_result(content)

    async def _answer(self, name: str, number: int | None, content: bytes) -> None:
        try:
            if name not in self._handlers:
                await self._ready.wait()
            handler = self._handlers.get(name)
            if handler is None:
                raise RollyardError(f"{self.name} asked for {name}, which is not known here")
            result = await handler(content)
            if number is not None:
                self._send({"answer": number}, result)
        except Exception as error:
            if number is None:
                self.fail(f"sent {name}, which failed: {type(error).__name__}: {error}")
                raise  # asyncio writes it to the log
            head, message = _packed(error)
            self._send({"answer": number, **head}, message)

    def _send(self, head: dict[str, object], content: bytes) -> None:
        line = json.dumps(head).encode() + b"\n"
        if len(line) + len(content) > LIMIT:
            raise RollyardError(f"{self.name}: a message of {len(content)} bytes is more than {LIMIT}")
        if not self._writer.is_closing():
            self._writer.write(SIZE.pack(len(line) + len(content)) + line + content)

    def _gone(self) -> EngineLost:
        return EngineLost(f"{self.name} {self._cause.result()}")


def _packed(error: Exception) -> tuple[dict[str, object], bytes]:
    """Head and content of an error that goes to the other end."""
    head: dict[str, object] = {"error": type(error).__name__, "retryable": getattr(error, "retryable", False)}
    text = str(error) if isinstance(error, RollyardError) else f"{type(error).__name__}: {error}"
    if isinstance(error, ConfigError):
        head = {"error": ConfigError.__name__, "retryable": False, "where": error.where, "remedy": error.remedy}
        text = error.problem
    return head, text.encode(errors="backslashreplace")


def _unpacked(head: dict[str, Any], content: bytes) -> RollyardError:
    """The error that the other end raised; one of a class that is not ours is a RollyardError."""
    message = content.decode()
    if head["error"] == ConfigError.__name__:
        return ConfigError(message, where=head["where"], remedy=head["remedy"])
    kind = getattr(errors, head["error"], None)
    error: RollyardError = (kind if isinstance(kind, type) and issubclass(kind, RollyardError) else RollyardError)(message)
    error.retryable = bool(head["retryable"])
    return error
