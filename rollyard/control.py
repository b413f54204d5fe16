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

from pydantic import TypeAdapter, ValidationError

from rollyard.errors import ConfigError
from rollyard.texts import in_a_line

NAME = "control.sock"
LINE = 2**16  # bytes of an order or an answer at most
ANSWER_S = 10.0  # seconds a run may take to answer


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of a run. `do` is list, add or remove."""

    do: str
    engine: str = ""
    url: str = ""
    cut: bool = False


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
async def serving(folder: Path, answer: Callable[[Order], Answer]) -> AsyncIterator[None]:
    """Answer orders in this folder meanwhile. Where no socket can be made there, that is told, and there are none."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, TimeoutError):  # whoever asked is gone, or said nothing that makes sense
            async with asyncio.timeout(ANSWER_S):
                order = ORDER.validate_json(await reader.readline())
            writer.write(ANSWER.dump_json(answer(order)) + b"\n")
            await writer.drain()
        writer.close()

    try:
        bound = _bound(folder)
    except OSError as error:
        warnings.warn(f"{folder}: the run takes no orders from outside: {error}", RuntimeWarning, stacklevel=2)
        yield
        return
    server = await asyncio.start_unix_server(connected, sock=bound, limit=LINE)
    try:
        yield
    finally:
        server.close()
        (folder / NAME).unlink(missing_ok=True)


def ask(folder: Path, order: Order) -> Answer:
    """Give a run an order. Raises ConfigError when there is none going on, it does not answer, or it refuses."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.settimeout(ANSWER_S)
        try:
            with _reached(folder) as path:
                line.connect(path)
            line.sendall(ORDER.dump_json(order) + b"\n")
            told = ANSWER.validate_json(_line(line))
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError):
            remedy = "give the folder of a run that is past its start, such as runs/NAME"
            raise ConfigError("no run is going on there, or it is still starting", where=str(folder), remedy=remedy) from None
        except TimeoutError:
            problem = f"the run did not answer within {ANSWER_S:g} s"
            remedy = "ask again: it answers while it goes on, not while a program that iterates over it does other work"
            raise ConfigError(problem, where=str(folder), remedy=remedy) from None
        except (OSError, ValidationError) as error:
            problem = f"the run does not answer: {in_a_line(error)}"
            raise ConfigError(problem, where=str(folder), remedy="look whether it goes on") from None
    if told.problem:
        raise ConfigError(told.problem, where=told.where, remedy=told.remedy)
    return told


def _line(line: socket.socket) -> bytes:
    """Raises TimeoutError for one that does not end in time, however often something of it comes."""
    until, said = time.monotonic() + ANSWER_S, b""
    while not said.endswith(b"\n") and len(said) < LINE:
        line.settimeout(max(until - time.monotonic(), 0.0) or 1e-9)
        if not (piece := line.recv(LINE - len(said))):
            break
        said += piece
    return said


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
