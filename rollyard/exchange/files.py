"""Files of an exchange: what is wrong with one is said in a line, and one job at a time may write."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from rollyard.durable import write_file
from rollyard.errors import ConfigError, ExchangeError

GRACE_S = 1.0  # seconds: somebody who looks whether a seat is taken holds it for a moment

T = TypeVar("T")


@contextmanager
def saying(problem: str) -> Iterator[None]:
    """An OSError is told as an ExchangeError."""
    try:
        yield
    except OSError as error:
        raise ExchangeError(f"{problem}: {error.strerror or error}") from error


def read_whole(path: Path, kind: TypeAdapter[T]) -> T:
    """What a JSON file holds. Raises ExchangeError, in one line, for one that is not there, broken, or of another kind."""
    try:
        return kind.validate_python(json.loads(path.read_bytes()))
    except OSError as error:
        raise ExchangeError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ExchangeError(f"{path} does not hold what belongs there: {where}{': ' * bool(where)}{first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise ExchangeError(f"{path} is damaged: {error}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file: whole or not at all. Raises ExchangeError."""
    with saying(f"{path} cannot be written"):
        write_file(path, content)


class Seat:
    """A lock file that says who holds it. It is free again once its holder has ended, however that ended.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: int | None = None

    def take(self, job: str) -> None:
        """Raises ConfigError when somebody else has it, ExchangeError when nobody can.

        Args:
            job: for the message, such as "generation".
        """
        with saying(f"{self._path} cannot be held"):
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._lock(handle, job)
            except BaseException:
                os.close(handle)
                raise
            self._handle = handle
            self._say(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")

    def _lock(self, handle: int, job: str) -> None:
        until = time.monotonic() + GRACE_S
        while not _locked(handle, fcntl.LOCK_EX):
            if time.monotonic() > until:
                problem = f"a {job} job holds it already: {self._said()}"
                raise ConfigError(problem, where="exchange.folder", remedy="end that one first, or give another folder")
            time.sleep(GRACE_S / 20)

    def leave(self, cause: str) -> None:
        """Let others have it, and say why. Harmless when it is not held."""
        if self._handle is not None:
            self._say(f"ended: {cause}")
            os.close(self._handle)
            self._handle = None

    def look(self) -> tuple[bool, str]:
        """Does anybody hold it? And what the last one who did says of itself; empty when there was none."""
        try:
            handle = os.open(self._path, os.O_RDONLY)
        except FileNotFoundError:
            return False, ""
        try:
            return not _locked(handle, fcntl.LOCK_SH), self._said()
        finally:
            os.close(handle)

    def _say(self, text: str) -> None:
        assert self._handle is not None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, text.encode(), 0)

    def _said(self) -> str:
        return self._path.read_text(encoding="utf-8", errors="replace").strip()


def _locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
