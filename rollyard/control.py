"""How another process speaks to a run: through a socket in the run's folder, which only the user may open.

One order and one answer a connection, a line of JSON each. It is a file of this machine: no network has part in it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from rollyard.errors import ConfigError
from rollyard.texts import in_a_line

T = TypeVar("T")

NAME = "control.sock"
LOOK = "look"  # an order that every run takes from its start on
LINE = 2**16  # bytes of an order at most
TOLD = 2**22  # bytes of an answer at most
ANSWER_S = 10.0  # seconds a run may take to answer


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of a run. `do` is list, add, remove or look.

    `known` is of look alone, and in the words of whoever answers: what the asker has heard before.
    """

    do: str
    engine: str = ""
    url: str = ""
    cut: bool = False
    known: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of it; `problem` where nothing did, as in ConfigError."""

    text: str = ""
    engines: tuple[tuple[str, str], ...] = ()  # each with its state
    problem: str = ""
    where: str = ""
    remedy: str = ""


ORDER, ANSWER = TypeAdapter(Order), TypeAdapter(Answer)


@asynccontextmanager
async def serving(folder: Path, answer: Callable[[Order], Answer | bytes]) -> AsyncIterator[None]:
    """Answer orders in this folder meanwhile. Where no socket can be made there, that is told, and there are none.

    Args:
        answer: gives an answer, or a line of JSON as it is.
    """

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, TimeoutError):  # whoever asked is gone, or said nothing that makes sense
            async with asyncio.timeout(ANSWER_S):
                order = ORDER.validate_json(await reader.readline())
            told = answer(order)
            writer.write((told if isinstance(told, bytes) else ANSWER.dump_json(told)) + b"\n")
            await writer.drain()
        writer.close()

    try:
        bound = _bound(folder)
    except OSError as error:
        warnings.warn(f"{folder}: the run takes no orders from outside: {error}", RuntimeWarning, stacklevel=2)
        yield
        return
    server = await asyncio.start_unix_server(connected, sock=bound, limit=LINE, start_serving=False)  # which gives way nowhere
    try:
        await server.start_serving()  # it listens already when this is cancelled
        yield
    finally:
        server.close()
        (folder / NAME).unlink(missing_ok=True)


def ask(folder: Path, order: Order) -> Answer:
    """Give a run an order. Raises ConfigError when there is none going on, it does not answer, or it refuses."""
    told = asked(folder, order, ANSWER)
    if told.problem:
        raise ConfigError(told.problem, where=told.where, remedy=told.remedy)
    return told


def asked(folder: Path, order: Order, kind: TypeAdapter[T], limit_s: float | None = None) -> T:
    """What a run answers, of this kind. Raises ConfigError when there is none going on, or it answers something else."""
    limit_s = ANSWER_S if limit_s is None else limit_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(limit_s)
        try:
            with _reached(folder) as path:
                line.connect(path)
            line.sendall(ORDER.dump_json(order) + b"\n")
            return kind.validate_json(_line(line, limit_s))
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            remedy = "give the folder of a run that is past its start, such as runs/NAME"
            raise ConfigError("no run is going on there, or it is still starting", where=str(folder), remedy=remedy) from None
        except TimeoutError:
            problem = f"the run did not answer within {limit_s:g} s"
            remedy = "ask again: it answers while it goes on, not while a program that iterates over it does other work"
            raise ConfigError(problem, where=str(folder), remedy=remedy) from None
        except (OSError, ValidationError) as error:
            problem = f"the run does not answer: {in_a_line(error)}"
            raise ConfigError(problem, where=str(folder), remedy="look whether it goes on") from None


def _line(line: socket.socket, limit_s: float) -> bytes:
    """Raises TimeoutError for one that does not end in time, however often something of it comes."""
    until, said = time.monotonic() + limit_s, bytearray()
    while not said.endswith(b"\n") and len(said) < TOLD:
        line.settimeout(max(until - time.monotonic(), 0.0) or 1e-9)
        if not (piece := line.recv(min(TOLD - len(said), LINE))):
            break
        said += piece
    return bytes(said)


def _bound(folder: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        (folder / NAME).unlink(missing_ok=True)
        with _reached(folder) as path:
            made.bind(path)
        (folder / NAME).chmod(0o600)  # nobody can connect before somebody listens
    except OSError:
        made.close()
        raise
    return made


@contextmanager
def _reached(folder: Path) -> Iterator[str]:
    """The socket's path, however deep the folder lies: the system takes no more than 107 bytes."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{NAME}"
    finally:
        os.close(handle)
