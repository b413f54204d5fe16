"""The durable record of a run: SQLite in WAL mode, written in batches on a thread of its own.

Beside a driver that is always busy a write of 10,000 members stops it for 7 ms at a time that way, and for 60 ms and more on
its own thread; the statements let go of the interpreter's lock, packing does not.

What was written survives a killed process; what `commit_checkpoint` has written survives a power cut too.
Reading: `rollyard.journal.reader`, or any SQLite client, also while the run is going on.
"""

from __future__ import annotations

import math
import sqlite3
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rollyard.errors import JournalError
from rollyard.events import Event, Instruction
from rollyard.journal.codec import checksum, pack_floats, pack_ids, pack_spans
from rollyard.journal.decode import PARTIAL, piece_of
from rollyard.journal.partials import Key, Unfinished, joined
from rollyard.journal.rows import Began, Entry, Judged, Rows, Saved
from rollyard.journal.schema import APPLICATION_ID, FORGET_PARTIAL, FORMAT, TABLES, WRITE_PARTIAL, WRITES
from rollyard.types import WeightVersion

FLUSH_S: Final = 1.0  # what is recorded waits so long, and for the write before it, as long as somebody calls
FRESH_S: Final = 3.0  # tokens of members that have not finished wait so long: most finish before, and have rows of their own then
HELD_MOST: Final = 10_000  # entries that wait; then they are written at once, and the caller waits for the write before
READ_PARTIAL: Final = f"SELECT {PARTIAL} FROM partials WHERE incarnation = ? AND group_id = ? AND member = ? ORDER BY position"
SLOW_S: Final = 60.0  # that a write may take
SLOW: Final = f"a write has taken {SLOW_S:g} s and is not over"
LOG_PAGES: Final = 4000  # the write-ahead log is folded into the file, and synced, at about 16 MB


@dataclass(frozen=True, slots=True)
class RunRecord:
    """What the journal says about the run as a whole. `config` is the resolved config as a JSON text."""

    name: str
    rollyard: str  # version of the package
    seed: int
    group_size: int
    config: str


def is_stopped(error: Exception) -> bool:
    """Was it Ctrl-C that ended what SQLite did? It keeps to itself what was raised meanwhile (see `quiet.connect`)."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """SQLite's errors, texts that are none, and numbers that it has no room for, as JournalError naming the file.

    Raises KeyboardInterrupt when it was Ctrl-C that ended what SQLite did.
    """
    try:
        yield
    except (sqlite3.Error, struct.error, OverflowError, UnicodeDecodeError) as error:
        if is_stopped(error):
            raise KeyboardInterrupt from None
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
    """Writes the journal of one incarnation. One caller at a time, and one writer a file.

    A new file starts at incarnation 0. Opening an existing one begins the next incarnation.

    What is written has a name, and is one transaction: `create`, `life`, `flush`, `checkpoint`.

    Args:
        path: the file, such as `runs/sort/journal.sqlite`. Its folder exists.
        run: what is said about the run as a whole.
        clock: unix seconds, for the times in the rows. Where it goes back, they do not: what came later has a later one.
        timer: seconds, which decide when the next write is due.
        busy_s: seconds to wait for another process that holds the write lock.
        at: told `before NAME` and `after NAME` of every write. Everything is then written by the caller's own thread, so that
            what `at` raises ends the caller, as a kill would there.

    Raises:
        JournalError: the file cannot be written, is no journal, or is of an unknown format.
    """

    def __init__(
        self,
        path: Path,
        run: RunRecord,
        *,
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
        busy_s: float = 5.0,
        at: Callable[[str], None] | None = None,
    ) -> None:
        self._path, self._clock, self._timer, self._at = path, clock, timer, at
        self._last = 0.0  # time that was given to a row
        self._entries: list[
            float | Entry
        ] = []  # of whole steps, each after its time: no pairs, which the garbage collector counts
        self._flushed = self._fresh = timer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")  # one write at a time, of `_rows`
        self._writing: Future[None] | None = None
        self._committing: Future[None] | None = None  # a checkpoint, after that
        self._refused = ""  # what the first step had that could not be written
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
        connection.execute("PRAGMA synchronous = FULL")  # nothing that a life leaves in its folder is there before its row
        if connection.execute("PRAGMA schema_version").fetchone() == (0,):
            connection.execute("PRAGMA journal_mode = WAL")
            self._create()
        check_format(connection, self._path)
        connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        incarnation = self._begin_life(run)
        connection.execute("PRAGMA synchronous = NORMAL")
        return incarnation

    def _create(self) -> None:
        with self._transaction("create"):
            for statement in (f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {FORMAT}", *TABLES):
                self._connection.execute(statement)

    def _begin_life(self, run: RunRecord) -> int:
        with self._transaction("life"):
            (last,) = self._connection.execute("SELECT max(incarnation) FROM incarnations").fetchone()
            incarnation = 0 if last is None else int(last) + 1
            row = (incarnation, run.name, run.rollyard, run.seed, run.group_size, run.config, self._now())
            self._connection.execute("INSERT INTO incarnations VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL, NULL, NULL)", row)
        return incarnation

    def _write_rows(self, name: str, unfinished: list[tuple[Key, Unfinished]]) -> None:
        """The `flush`, or the `checkpoint`: all rows there are, and what these members were given, or have no more."""
        with self._transaction(name):
            for table, rows in self._rows.tables.items():
                if rows:
                    self._connection.executemany(WRITES[table], rows)
            fresh = [self._partial(key, member) for key, member in unfinished if member.tokens]
            gone = [(self.incarnation, *key) for key, member in unfinished if member.keep < member.saved]
            self._connection.executemany(FORGET_PARTIAL, gone)
            self._connection.executemany(WRITE_PARTIAL, fresh)
        self._rows.clear()
        self._rows.unfinished.written(unfinished)

    @contextmanager
    def _transaction(self, name: str) -> Iterator[None]:
        if self._at is not None:
            self._at(f"before {name}")
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite itself rolls back on some errors, such as a full disk
                self._connection.execute("ROLLBACK")
            raise
        if self._at is not None:
            self._at(f"after {name}")

    def _partial(self, key: Key, member: Unfinished) -> tuple[object, ...]:
        """The row that an unfinished member is to get, after those it keeps, or in their place where they are cut."""
        mine, position, pieces = (self.incarnation, *key), member.keep, member.fresh
        if 0 < position < member.saved:
            saved = (piece_of(*row) for row in self._connection.execute(READ_PARTIAL, mine))
            position, pieces = 0, [joined(saved, position), *pieces]
        tokens, logprobs, spans = joined(pieces)
        ids, packed, spans_text = pack_ids(tokens), pack_floats(logprobs), pack_spans(spans)
        check = checksum(ids, packed, f"{self.incarnation} {key[0]} {key[1]} {position} {spans_text}")
        return (*mine, position, len(tokens), ids, packed, spans_text, check)

    # ------------------------------------------------------------------------------------------- recording

    def _now(self) -> float:
        self._last = max(self._clock(), math.nextafter(self._last, math.inf))
        return self._last

    def record_step(self, entries: Iterable[Event | Instruction]) -> None:
        """Keep what the conductor saw and said in one of its steps. What the journal has no table for is ignored.

        It is written whole or not at all, see `tick`.
        """
        held, kinds = self._entries, self._rows.kinds
        held.append(self._now())
        held.extend([entry for entry in entries if type(entry) in kinds])

    def record_beginning(self, version: WeightVersion) -> None:
        """Keep where this life of the run begins."""
        self._entries += (self._now(), Began(version))

    def record_evaluation(self, version: WeightVersion, mean_reward: float | None, samples: int, unscored: int = 0) -> None:
        """Keep a result on held-out prompts: mean over the `samples - unscored` completions that have a verdict."""
        self._entries += (self._now(), Judged(version, mean_reward, samples, unscored))

    # --------------------------------------------------------------------------------------------- writing

    def tick(self) -> None:
        """Begin to write what is held back, once that is due, by time or by how much it is; often, and never within a step.

        Raises JournalError when the write before failed (disk full, locked, broken file). Nothing is lost then, the next one
        tries again; but for a step that had something which no column can hold.
        """
        now, full = self._timer(), len(self._entries) > HELD_MOST
        if now - self._flushed < FLUSH_S and not full:
            return
        if self._at is not None:
            self.flush()
        elif full or self._writing is None or self._writing.done():
            self._told()
            self._flushed = now
            fresh = now - self._fresh >= FRESH_S
            if fresh:
                self._fresh = now
            entries, self._entries = self._entries, []
            self._writing = self._thread.submit(self._write, "flush", entries, fresh=fresh)

    def flush(self) -> None:
        """Write what is held back before it returns. Raises JournalError as `tick` does."""
        self._wait()
        self._flushed = self._fresh = self._timer()
        entries, self._entries = self._entries, []
        self._write("flush", entries)

    def _wait(self) -> None:
        """For all writes before. Raises JournalError when the last failed, but for checkpoints, whose callers know."""
        if self._committing is not None and not wait((self._committing,), SLOW_S).done:
            raise JournalError(f"{self._path}: {SLOW}")
        self._committing = None
        self._told()

    def _told(self) -> None:
        """What became of the write before, once it is over. Raises JournalError when that failed."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result(SLOW_S)
            except TimeoutError:
                self._writing = writing
                raise JournalError(f"{self._path}: {SLOW}") from None

    def _write(self, name: str, entries: Iterable[float | Entry], *, fresh: bool = True) -> None:
        """One transaction of these and of what could not be written before.

        Args:
            fresh: also what members that have not finished were given since.
        """
        with guarded(self._path):
            problem = self._rows.take(entries)
            self._refused = self._refused or problem
            if self._refused:  # a checkpoint would stand on what is not there
                self._rows.tables["checkpoints"].clear()
            unfinished = self._rows.unfinished.changed(fresh=fresh)
            if unfinished or any(self._rows.tables.values()):
                self._write_rows(name, unfinished)
        if problem or (self._refused and name == "checkpoint"):
            raise JournalError(f"{self._path}: a step cannot be written, nor what follows of its prompts: {self._refused}")

    def commit_checkpoint(
        self, version: WeightVersion, folder: str, prompt_cursor: int, counters: Mapping[str, object]
    ) -> Future[None]:
        """Begin to name a checkpoint that is complete on disk. Once that is done a resume starts there.

        One transaction with everything still held back, and what earlier writes could not write. It is over, and on the disk,
        when what is returned is; nobody needs to wait for it before more is recorded.

        Args:
            version: the weights it holds.
            folder: its folder, relative to the run's.
            prompt_cursor: prompts taken from the source.
            counters: running totals to go on from.

        What is returned raises JournalError: the checkpoint does not count.
        """
        entries, self._entries = self._entries, []
        entries += (self._now(), Saved(version, folder, prompt_cursor, counters))
        if self._at is not None:
            self._commit(entries)
            done = Future[None]()
            done.set_result(None)
            return done
        self._writing = None  # it comes first, and what it could not write is written now
        self._committing = self._thread.submit(self._commit, entries)
        return self._committing

    def _commit(self, entries: Iterable[float | Entry]) -> None:
        with guarded(self._path):
            self._connection.execute("PRAGMA synchronous = FULL")
        try:
            self._write("checkpoint", entries)
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
            self.abandon()

    def abandon(self) -> None:
        """Close the file as it is: what is held back is lost, as in a process that is killed. Raises JournalError."""
        under_way = [each for each in (self._writing, self._committing) if each is not None]
        self._writing = self._committing = None
        self._thread.shutdown(wait=False)
        if not wait(under_way, SLOW_S).not_done:  # a write that hangs has the file
            with guarded(self._path):
                self._connection.close()
