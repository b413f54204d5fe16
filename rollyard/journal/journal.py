"""The durable record of a run: SQLite in WAL mode, written in batches.

What `flush` has written survives a killed process; what `commit_checkpoint` has written survives a power cut too.
Reading: `rollyard.journal.reader`, or any SQLite client, also while the run is going on.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard.errors import JournalError
from rollyard.events import Event, Instruction
from rollyard.journal.codec import pack_json
from rollyard.journal.partials import Key, Unfinished, joined, pack_piece, unpack_piece
from rollyard.journal.rows import Rows
from rollyard.journal.schema import APPLICATION_ID, FORMAT, TABLES, WRITES
from rollyard.types import WeightVersion

FLUSH_S: Final = 1.0  # a recorded row waits no longer than this, as long as rows keep coming
LOG_PAGES: Final = 4000  # the write-ahead log is folded into the file, and synced, at about 16 MB

SAVED: Final = """
    SELECT token_ids, logprobs, spans FROM partials
    WHERE incarnation = ? AND group_id = ? AND member = ? ORDER BY position"""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What the journal says about the run as a whole. `config` is the resolved config as a JSON text."""

    name: str
    rollyard: str  # version of the package
    seed: int
    group_size: int
    config: str


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """SQLite's errors, and numbers that it has no room for, as JournalError naming the file."""
    try:
        yield
    except (sqlite3.Error, OverflowError) as error:
        raise JournalError(f"{path}: {error}") from error


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raises JournalError when the file is no journal, or one of a format this version does not know."""
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise JournalError(f"{path}: not a Rollyard journal")
    if version != FORMAT:
        raise JournalError(f"{path}: written in journal format {version}, this version of Rollyard knows format {FORMAT}")


class Journal:
    """Writes the journal of one incarnation. Not thread-safe; one writer a file.

    A new file starts at incarnation 0. Opening an existing one begins the next incarnation.

    What is written has a name: `create`, `life`, `flush`, `checkpoint`. Each is one transaction.

    Args:
        path: the file, such as `runs/sort/journal.sqlite`. Its folder exists.
        run: what is said about the run as a whole.
        clock: unix seconds, for the times in the rows.
        busy_s: seconds to wait for another process that holds the write lock.
        at: told `before NAME` and `after NAME` of every write. What it raises ends the caller, as a kill would there.

    Raises:
        JournalError: the file cannot be written, is no journal, or is of an unknown format.
    """

    def __init__(
        self,
        path: Path,
        run: RunRecord,
        *,
        clock: Callable[[], float] = time.time,
        busy_s: float = 5.0,
        at: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._path = path
        self._clock = clock
        self._at = at
        self._entries: list[tuple[float, Event | Instruction]] = []
        self._flushed = time.monotonic()
        with guarded(path):
            self._connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
            try:
                self.incarnation = self._begin(run)
            except BaseException:
                self._connection.close()
                raise
        self._rows = Rows(self.incarnation)

    # -------------------------------------------------------------------------------------- the transactions

    def _begin(self, run: RunRecord) -> int:
        connection = self._connection
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA schema_version").fetchone() == (0,):
            connection.execute("PRAGMA journal_mode = WAL")
            self._create()
        check_format(connection, self._path)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        return self._begin_life(run)

    def _create(self) -> None:
        with self._transaction("create"):
            for statement in (f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {FORMAT}", *TABLES):
                self._connection.execute(statement)

    def _begin_life(self, run: RunRecord) -> int:
        with self._transaction("life"):
            (last,) = self._connection.execute("SELECT max(incarnation) FROM incarnations").fetchone()
            incarnation = 0 if last is None else int(last) + 1
            row = (incarnation, run.name, run.rollyard, run.seed, run.group_size, run.config, self._clock())
            self._connection.execute("INSERT INTO incarnations VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL, NULL, NULL)", row)
        return incarnation

    def _write(self, name: str) -> None:
        """All rows there are."""
        with self._transaction(name):
            for table, rows in self._rows.tables.items():
                if rows:
                    self._connection.executemany(WRITES[table], rows)
            for key, member in self._rows.unfinished.changed():
                self._write_partial(key, member)
        self._rows.written()

    @contextmanager
    def _transaction(self, name: str) -> Iterator[None]:
        self._at(f"before {name}")
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite itself rolls back on some errors, such as a full disk
                self._connection.execute("ROLLBACK")
            raise
        self._at(f"after {name}")

    def _write_partial(self, key: Key, member: Unfinished) -> None:
        """Part of a transaction: the rows of one member that has not finished, or that has."""
        mine = (self.incarnation, *key)
        pieces, position = member.fresh, member.keep
        if member.keep < member.saved:  # what is in the file was given up, often all of it
            if member.keep:
                saved = (unpack_piece(*row) for row in self._connection.execute(SAVED, mine))
                pieces, position = [joined(saved, member.keep), *pieces], 0
            self._connection.execute("DELETE FROM partials WHERE incarnation = ? AND group_id = ? AND member = ?", mine)
        if pieces:
            row = (*mine, position, *pack_piece(joined(pieces)))
            self._connection.execute("INSERT INTO partials VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)

    # ------------------------------------------------------------------------------------------- recording

    def record_step(self, entries: Iterable[Event | Instruction]) -> None:
        """Keep what the conductor saw and said in one of its steps. What the journal has no table for is ignored.

        It is written whole or not at all: by `flush`, or here once a second has passed since the last write.
        Raises JournalError when that fails.
        """
        now, kinds = self._clock(), self._rows.kinds
        self._entries.extend((now, entry) for entry in entries if type(entry) in kinds)
        if time.monotonic() - self._flushed >= FLUSH_S:
            self.flush()

    def record_beginning(self, version: WeightVersion) -> None:
        """Keep where this life of the run begins."""
        self._rows.begun(version)

    def record_evaluation(self, version: WeightVersion, mean_reward: float | None, samples: int, unscored: int = 0) -> None:
        """Keep a result on held-out prompts: mean over the `samples - unscored` completions that have a verdict."""
        self._rows.evaluated(version, mean_reward, samples, unscored, self._clock())

    # --------------------------------------------------------------------------------------------- writing

    def flush(self) -> None:
        """Write what is held back in one transaction. Call it at least every second, never within a step.

        Raises JournalError when that fails (disk full, locked, broken file); nothing is lost then, and the next call tries again.
        """
        self._flush("flush")

    def _flush(self, name: str) -> None:
        self._flushed = time.monotonic()
        with guarded(self._path):
            entries, self._entries = self._entries, []
            self._rows.take(entries)
            if self._rows:
                self._write(name)

    def commit_checkpoint(self, version: WeightVersion, folder: str, prompt_cursor: int, counters: Mapping[str, object]) -> None:
        """Name a checkpoint that is complete on disk. From here on a resume starts there.

        One transaction with everything still held back, synced to the disk before it returns.

        Args:
            version: the weights it holds.
            folder: its folder, relative to the run's.
            prompt_cursor: prompts taken from the source.
            counters: running totals to go on from.

        Raises:
            JournalError: the checkpoint does not count.
        """
        self._rows.checkpointed(version, folder, prompt_cursor, pack_json(counters), self._clock())
        with guarded(self._path):
            self._connection.execute("PRAGMA synchronous = FULL")
        try:
            self._flush("checkpoint")
        except JournalError:
            self._rows.tables["checkpoints"].clear()
            raise
        finally:
            with guarded(self._path):
                self._connection.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Write what is held back and close the file, folding the write-ahead log into it. Raises JournalError."""
        try:
            self.flush()
        finally:
            with guarded(self._path):
                self._connection.close()

    def abandon(self) -> None:
        """Close the file as it is: what is held back is lost, as in a process that is killed."""
        with guarded(self._path):
            self._connection.close()
