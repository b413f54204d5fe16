"""Calls, answers and errors between two processes as frames: JSON heads, never pickle, whatever carries them.

A frame is a head of one line of JSON, and the content as it is. Heads:

    {"call": NAME, "id": N}     a call; without "id" nobody waits for an answer
    {"answer": N}               the answer; the content is the result
    {"answer": N, "error": CLASS, "retryable": BOOL}    the content is the message
    {"end": true}               the last frame; the content is the cause of the end
    {"end": true, "error": CLASS, "retryable": BOOL}    the last frame: whoever waits gets this error

An error that is a user's mistake also has "where" and "remedy" in its head.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from rollyard import errors
from rollyard.errors import ConfigError, EngineError, EngineLost, RollyardError, TimeLimitExceeded
from rollyard.protocols.processes import Channel

SIZE = struct.Struct("<I")  # of a frame, written before it where frames are carried one after the other
LIMIT = 2**30  # bytes of a frame at most
FLUSH_S = 2.0  # seconds that what is under way at the end may take
Handler = Callable[[bytes], Awaitable[bytes]]
Host = Callable[[Channel, bytes], Coroutine[Any, Any, None]]


def nothing() -> str:
    return ""


class Line(ABC):
    """One end (protocols.Channel). What carries it calls `take` for each frame that comes, and `fail` when none will any more.

    Handlers begin in the order in which their calls came, and before an answer that came after them is handed on: what a
    handler does before its first wait is done by then.

    Args:
        name: of the other end, for messages.
        said: what the other end printed last, for messages.
    """

    def __init__(self, name: str, said: Callable[[], str] = nothing) -> None:
        self.name = name
        self._said = said
        self._handlers: dict[str, Handler] = {}
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._numbers = itertools.count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self._cause: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._error: RollyardError | None = None  # what the other end ended with
        self._ready = asyncio.Event()
        self.heard = False  # a frame has come

    @abstractmethod
    def _post(self, head: bytes, content: bytes) -> None:
        """Send a frame: one after the other. Nothing is sent, and nothing raised, once the line is closed."""

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

        A time limit that ran out, or an engine that failed, says what the other end printed last.
        """
        try:
            return await self._call(name, content, limit_s)
        except TimeLimitExceeded as error:
            raise TimeLimitExceeded(f"{error}{self._said()}") from None
        except EngineError as error:
            if type(error) is not EngineError:
                raise
            raise EngineError(f"{error}{self._said()}") from None

    async def _call(self, name: str, content: bytes, limit_s: float) -> bytes:
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

    def end_because(self, cause: str) -> None:
        """Tell the other end why this one ends: whoever waits there gets EngineLost."""
        self._send({"end": True}, cause.encode(errors="backslashreplace"))

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
        """Give up what is under way. Closing twice is harmless."""
        await self._cancel(*self._tasks)
        self.fail("was closed")

    async def _cancel(self, *tasks: asyncio.Task[None] | None) -> None:
        ending = [task for task in tasks if task is not None and task is not asyncio.current_task()]
        for task in ending:
            task.cancel()
        if ending:
            await asyncio.wait(ending, timeout=FLUSH_S)

    def take(self, frame: bytes) -> None:
        """A frame has come. Raises ValueError when it is none; nothing more should be taken then."""
        self.heard = True
        head, _, content = frame.partition(b"\n")
        try:
            self._take(json.loads(head), content)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problem = f"sent what is no message: {type(error).__name__}: {error}"
            self.fail(problem)
            raise ValueError(f"{self.name} {problem}") from error

    def _take(self, head: dict[str, Any], content: bytes) -> None:
        if "call" in head:
            task = asyncio.create_task(self._answer(head["call"], head.get("id"), content))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif "end" in head:
            error = _unpacked(head, content) if "error" in head else None
            self.fail(content.decode() if error is None else f"ended: {error}", error)
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
        self._post(line, content)

    def _gone(self) -> EngineLost:
        return EngineLost(f"{self.name} {self._cause.result()}")


async def serve(line: Line, host: Host, order: bytes | None = None) -> None:
    """Run `host` until it fails, is told to quit, or the line ends.

    Args:
        order: what it gets; when None, the other end sends it.

    Raises what the host failed with. A user's mistake is told to the other end as one.
    """
    ordered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    quitting = asyncio.Event()
    if order is not None:
        ordered.set_result(order)

    async def take_order(content: bytes) -> bytes:
        ordered.set_result(content)
        return b""

    async def take_quit(content: bytes) -> bytes:
        quitting.set()
        return b""

    async def hosting() -> None:
        await host(line, await ordered)

    line.handle("order", take_order)
    line.handle("quit", take_quit)
    tasks = [asyncio.create_task(hosting()), asyncio.create_task(quitting.wait()), asyncio.create_task(line.ended())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done() and not line.lost:
            tasks[0].result()  # raises, since it does not end by itself but by an error
    except ConfigError as error:
        line.end(error)
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


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
