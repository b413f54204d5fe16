"""`service.sqlite` in a run's folder: what clients were promised, beside the journal, which has what the run did.

    submissions  a client's key, and the prompts that were accepted under it
    prompts      those of them that the run may not have taken yet, as they were submitted
    outcomes     finished groups, and prompts that were dropped, in the order in which that happened; a row's number is the
                 cursor of readers

One thread writes, another one reads outcomes: who is far behind keeps no writer waiting. What is written here lasts when the
process is killed, or power fails, before a client hears of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http import HTTPStatus
from pathlib import Path
from typing import Final, TypeVar

from rollyard.errors import JournalError
from rollyard.serve.refusals import Refused

T = TypeVar("T")

NAME: Final = "service.sqlite"
FORMAT: Final = 1
PAGE: Final = 4 * 2**20  # bytes of outcomes that are read at a time
TABLES: Final = """
CREATE TABLE IF NOT EXISTS submissions (
    key TEXT PRIMARY KEY,
    digest BLOB NOT NULL,
    first INTEGER NOT NULL,
    prompts INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS prompts (id INTEGER PRIMARY KEY, content BLOB NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS outcomes (
    cursor INTEGER PRIMARY KEY AUTOINCREMENT,
    id INTEGER NOT NULL,
    digest BLOB NOT NULL,
    content BLOB NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS outcomes_by_id ON outcomes (id, cursor);
"""


class Store:
    """Keeps what was promised. Raises JournalError when the file cannot be read or written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="service")
        self._file = self._thread.submit(self._opened).result()
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="service-readers")
        self._reading = self._readers.submit(self._opened_to_read).result()

    async def submission(self, key: str, content: Sequence[bytes]) -> tuple[int, ...] | None:
        """The prompts that were accepted under this key, if any were. Raises Refused when those were others."""

        def look(file: sqlite3.Connection) -> tuple[bytes, int, int] | None:
            found: tuple[bytes, int, int] | None = file.execute(
                "SELECT digest, first, prompts FROM submissions WHERE key = ?", (key,)
            ).fetchone()
            return found

        found = await self._do(look)
        if found is None:
            return None
        if found[0] != _digest(content):
            problem, remedy = "other prompts were submitted under this key", "use a new key for what is new"
            raise Refused(HTTPStatus.CONFLICT, problem, "key_used", "key", remedy)
        return tuple(range(found[1], found[1] + found[2]))

    async def promise(self, key: str, first: int, content: Sequence[bytes]) -> None:
        """Prompts with the ids from `first` on will be asked."""

        def write(file: sqlite3.Connection) -> None:
            if key:
                file.execute("INSERT INTO submissions VALUES (?, ?, ?, ?)", (key, _digest(content), first, len(content)))
            file.executemany("INSERT INTO prompts VALUES (?, ?)", enumerate(content, first))

        await self._do(write)

    async def take_back(self, key: str, first: int) -> None:
        """They will not: the run did not take those from `first` on."""

        def write(file: sqlite3.Connection) -> None:
            file.execute("DELETE FROM submissions WHERE key = ?", (key,))
            file.execute("DELETE FROM prompts WHERE id >= ?", (first,))

        await self._do(write)

    async def promised(self, first: int) -> list[tuple[int, bytes]]:
        """Prompts, each with its id, from the id `first` on. Those before are in the journal, and forgotten here."""

        def look(file: sqlite3.Connection) -> list[tuple[int, bytes]]:
            file.execute("DELETE FROM prompts WHERE id < ?", (first,))
            return file.execute("SELECT id, content FROM prompts ORDER BY id").fetchall()

        return await self._do(look)

    async def keep(self, outcomes: Sequence[tuple[int, bytes]]) -> None:
        """What became of prompts, each by its id. What was said last of one is not kept twice."""

        def write(file: sqlite3.Connection) -> None:
            for id_, content in outcomes:
                digest = _digest([content])
                last = "SELECT digest FROM outcomes WHERE id = ? ORDER BY cursor DESC LIMIT 1"
                if file.execute(last, (id_,)).fetchone() != (digest,):
                    file.execute("INSERT INTO outcomes (id, digest, content) VALUES (?, ?, ?)", (id_, digest, content))

        await self._do(write)

    async def outcomes(self, after: int, most: int) -> list[tuple[int, bytes]]:
        """Those after a cursor, each with its own, at most so many and `PAGE`; one that is larger comes alone."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._page, after, most)

    def _page(self, after: int, most: int) -> list[tuple[int, bytes]]:
        query = "SELECT cursor, content FROM outcomes WHERE cursor > ? ORDER BY cursor LIMIT ?"
        found, size = list[tuple[int, bytes]](), 0
        try:
            with closing(self._reading.execute(query, (after, most))) as rows:
                for row in rows:
                    size += len(row[1])
                    if found and size > PAGE:
                        break
                    found.append(row)
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: {error}") from error
        return found

    async def last(self) -> int:
        """The newest cursor; 0 when there is none."""
        (found,) = await self._do(lambda file: file.execute("SELECT coalesce(max(cursor), 0) FROM outcomes").fetchone())
        return int(found)

    def close(self) -> None:
        self._readers.submit(self._reading.close).result()
        self._readers.shutdown()
        self._thread.submit(self._file.close).result()
        self._thread.shutdown()

    def _opened(self) -> sqlite3.Connection:
        try:
            file = sqlite3.connect(self._path, isolation_level=None)
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = FULL")
            (version,) = file.execute("PRAGMA user_version").fetchone()
            if version not in (0, FORMAT):
                raise JournalError(f"{self._path}: written in format {version}, this version of Rollyard knows format {FORMAT}")
            file.executescript(TABLES)
            file.execute(f"PRAGMA user_version = {FORMAT}")
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: {error}") from error
        return file

    def _opened_to_read(self) -> sqlite3.Connection:
        try:
            file = sqlite3.connect(self._path, isolation_level=None)
            file.execute("PRAGMA query_only = ON")
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: {error}") from error
        return file

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._done, work)

    def _done(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """As one transaction."""
        try:
            self._file.execute("BEGIN IMMEDIATE")
            try:
                result = work(self._file)
            except BaseException:
                self._file.execute("ROLLBACK")
                raise
            self._file.execute("COMMIT")
        except sqlite3.Error as error:
            raise JournalError(f"{self._path}: {error}") from error
        return result


def _digest(parts: Sequence[bytes]) -> bytes:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little") + part)
    return found.digest()
