"""Opens a journal so that nothing in its folder changes: no log is folded in or left behind, and no writer has to wait."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

from rollyard.journal.journal import guarded

HEARD = 100_000  # instructions of SQLite, some milliseconds, between two moments in which Python hears of Ctrl-C
LOG, INDEX = "-wal", "-shm"  # beside the file: what was written since it was last folded in, and where in that what is


def is_settled(path: Path) -> bool:
    """Does nobody write to it, as far as its folder tells? Whoever has it open keeps an index of the log beside it."""
    return not _beside(path, INDEX).exists()


def connect(path: Path) -> sqlite3.Connection:
    """Read only. Raises JournalError when SQLite cannot open it.

    A journal that is being written, or was by a process that got killed, is read as SQLite does it: the index of its log is
    there, so nothing is made. One that has a log without an index (it was copied) gets an index in memory. Else there is
    the file alone, and SQLite is told that it does not change: it would make log and index anew, which a folder that may only
    be read does not allow.
    """
    alone = is_settled(path)
    how = "mode=ro" if not alone else "mode=ro&vfs=unix-none" if _has_log(path) else "mode=ro&immutable=1"
    with guarded(path):
        connection = sqlite3.connect(f"file:{quote(str(path.absolute()))}?{how}", uri=True, isolation_level=None)
        connection.text_factory = _text
        connection.set_progress_handler(lambda: 0, HEARD)
        if alone:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # by itself: no index of the log in a file
    return connection


def _text(content: bytes) -> str:
    """Also of what the disk has changed, so that its row alone is damaged: the checksum tells it from what was written."""
    return content.decode("utf-8", "backslashreplace")


def _has_log(path: Path) -> bool:
    log = _beside(path, LOG)
    return log.exists() and log.stat().st_size > 0


def _beside(path: Path, name: str) -> Path:
    return path.with_name(path.name + name)
