"""One engine of each machine receives for all engines there: who that is, and how the others hear from it.

Everybody tells in the group's store where it is. The first engine of a machine joins the group; it has a board in shared
memory, on which the others read what became of an offer. It holds a lock on that board as long as it lives.
"""

from __future__ import annotations

import fcntl
import os
import platform
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollyard.events import EngineId
from rollyard.meeting import told
from rollyard.weights.slot import SHARED

BOARD = 4096  # bytes
TURN_S = 0.001  # seconds between two looks at a board
TURNS = 50  # looks at a board between two at whether its owner lives


@dataclass(frozen=True, slots=True)
class Word:
    """What a relay says of one offer: where it lies, or why it does not."""

    number: int
    path: str
    problem: str = ""


WORD = TypeAdapter(Word)


def here(address: str) -> str:
    """Equal for engines that can open each other's memory: one machine, one set of process ids, one user, one address."""
    if not SHARED:
        return uuid.uuid4().hex
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{platform.node()} {boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()} {address}"


def relays(store: Any, members: Sequence[EngineId], limit_s: float) -> Mapping[EngineId, EngineId]:
    """Who receives for each of them: the first one of its machine. Raises RuntimeError when not all have come in time."""
    places = told(store, [f"at-{engine}" for engine in members], limit_s)
    first: dict[str, EngineId] = {}
    return {engine: first.setdefault(place, engine) for engine, place in zip(members, places, strict=True)}


def come(store: Any, engine: EngineId, place: str) -> None:
    """Tell where this engine is."""
    store.set(f"at-{engine}", place)


class Board:
    """That of the engine that receives for others."""

    def __init__(self, store: Any, engine: EngineId) -> None:
        self._handle = os.memfd_create("rollyard-board", os.MFD_CLOEXEC)
        os.ftruncate(self._handle, BOARD)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        store.set(f"board-{engine}", f"/proc/{os.getpid()}/fd/{self._handle}")

    def tell(self, word: Word) -> None:
        short = word if len(word.problem) < BOARD // 8 else Word(word.number, word.path, word.problem[: BOARD // 8])
        os.pwrite(self._handle, WORD.dump_json(short).ljust(BOARD), 0)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class Reader:
    """That of another engine.

    Raises RuntimeError when it is not there in time.
    """

    def __init__(self, store: Any, owner: EngineId, limit_s: float) -> None:
        self.owner, self._limit_s = owner, limit_s
        (path,) = told(store, [f"board-{owner}"], limit_s)
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(f"{owner}, which receives for this machine, is gone") from error

    def wait(self, number: int) -> Word:
        """What became of an offer. Raises RuntimeError when its owner ends before it says so, or is late."""
        until = time.monotonic() + self._limit_s
        while time.monotonic() < until:
            alive = self._alive()  # asked first: what it said last is read after its end
            for _ in range(TURNS):
                if (word := self._read()) is not None and word.number >= number:
                    return word if word.number == number else Word(number, "", "another offer was made meanwhile")
                if not alive:
                    raise RuntimeError(f"{self.owner}, which receives for this machine, is gone")
                time.sleep(TURN_S)
        raise RuntimeError(f"{self.owner}, which receives for this machine, is late")

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def _alive(self) -> bool:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False

    def _read(self) -> Word | None:
        """None before the first word; one is read whole, or another time."""
        content = os.pread(self._handle, BOARD, 0).strip(b"\0 ")
        try:
            return WORD.validate_json(content) if content else None
        except ValueError:
            return None
