"""The durable record of a run: SQLite in WAL mode, written in batches.

What `flush` has written survives a killed process; what `commit_checkpoint` has written survives a power cut too.
Reading: `rollyard.journal.reader`, or any SQLite client, also while the run is going on.
"""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rollyard.errors import JournalError
from rollyard.events import (
    Admit,
    BatchTrained,
    Drop,
    EngineDown,
    EngineLoaded,
    EngineUp,
    Event,
    Finish,
    Instruction,
    Keep,
    Published,
    RequestFailed,
    Retire,
    Score,
    Scored,
    Train,
)
from rollyard.journal.codec import pack_floats, pack_ids, pack_json, pack_spans, pack_turns
from rollyard.journal.schema import APPLICATION_ID, FORMAT, INSERTS, TABLES
from rollyard.texts import clean
from rollyard.types import WeightVersion

FLUSH_S: Final = 1.0  # a recorded row waits no longer than this, as long as rows keep coming
LOG_PAGES: Final = 4000  # the write-ahead log is folded into the file, and synced, at about 16 MB


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
    """SQLite's errors as JournalError naming the file."""
    try:
        yield
    except sqlite3.Error as error:
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

    Args:
        path: the file, such as `runs/sort/journal.sqlite`. Its folder exists.
        run: what is said about the run as a whole.
        clock: unix seconds, for the times in the rows.
        busy_s: seconds to wait for another process that holds the write lock.

    Raises:
        JournalError: the file cannot be written, is no journal, or is of an unknown format.
    """

    def __init__(self, path: Path, run: RunRecord, *, clock: Callable[[], float] = time.time, busy_s: float = 5.0) -> None:
        self._path = path
        self._clock = clock
        self._rows: dict[str, list[tuple[Any, ...]]] = {table: [] for table in INSERTS}
        self._flushed = time.monotonic()
        self._handlers: dict[type[Event | Instruction], Callable[[Any, float], None]] = {
            Admit: self._on_admit,
            Score: self._on_completion,
            Scored: self._on_verdict,
            Keep: self._on_keep,
            Drop: self._on_drop,
            Train: self._on_batch,
            BatchTrained: self._on_trained,
            Published: self._on_published,
            EngineUp: self._on_engine_up,
            Retire: lambda told, now: self._engine(told.engine, "lost" if told.lost else "left", None, "", now),
            EngineDown: lambda event, now: self._engine(event.engine, "down", None, event.cause, now),
            EngineLoaded: lambda event, now: self._engine(event.engine, "loaded", event.version, "", now),
            RequestFailed: self._on_request_failed,
            Finish: self._on_finish,
        }
        with guarded(path):
            self._connection = sqlite3.connect(path, timeout=busy_s, isolation_level=None, check_same_thread=False)
            try:
                self.incarnation = self._begin(run)
            except BaseException:
                self._connection.close()
                raise

    def _begin(self, run: RunRecord) -> int:
        connection = self._connection
        connection.execute("PRAGMA foreign_keys = ON")
        if connection.execute("PRAGMA schema_version").fetchone() == (0,):
            connection.execute("PRAGMA journal_mode = WAL")
            header = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
            connection.executescript(f"BEGIN IMMEDIATE; {header} {TABLES} COMMIT;")
        check_format(connection, self._path)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")
        with self._transaction():
            (last,) = connection.execute("SELECT max(incarnation) FROM incarnations").fetchone()
            incarnation = 0 if last is None else last + 1
            row = (incarnation, run.name, run.rollyard, run.seed, run.group_size, run.config, self._clock())
            connection.execute("INSERT INTO incarnations VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL, NULL)", row)
        return incarnation

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite itself rolls back on some errors, such as a full disk
                self._connection.execute("ROLLBACK")
            raise

    # ------------------------------------------------------------------------------------------- recording

    def record(self, entry: Event | Instruction) -> None:
        """Keep what the conductor saw or said. What the journal has no table for is ignored.

        Rows are buffered; they are written by `flush`, and with the first record a second after the last write.
        """
        handler = self._handlers.get(type(entry))
        if handler is None:
            return
        handler(entry, self._clock())
        if time.monotonic() - self._flushed >= FLUSH_S:
            self.flush()

    def record_evaluation(self, version: WeightVersion, mean_reward: float | None, samples: int, unscored: int = 0) -> None:
        """Keep a result on held-out prompts: mean over the `samples - unscored` completions that have a verdict."""
        self._rows["evaluations"].append((self.incarnation, *version, mean_reward, samples, unscored, self._clock()))

    def _on_admit(self, admit: Admit, now: float) -> None:
        prompt = admit.prompt
        columns = pack_json(prompt.columns)
        row = (self.incarnation, prompt.id, prompt.row, clean(prompt.text), pack_ids(prompt.token_ids), columns, now)
        self._rows["prompts"].append(row)

    def _on_completion(self, score: Score, now: float) -> None:
        done = score.completion
        self._rows["completions"].append((
            self.incarnation,
            done.group,
            done.member,
            done.finish.value,
            len(done.token_ids),
            pack_ids(done.token_ids),
            pack_floats(done.logprobs),
            pack_spans(done.spans),
            pack_turns(done.turns, done.token_ids),
            min((span.version.step for span in done.spans), default=None),
            clean(done.text),
            now,
        ))  # fmt: skip

    def _on_verdict(self, scored: Scored, now: float) -> None:
        reward = scored.reward
        value, problem = reward.value, reward.problem
        if value is not None and not math.isfinite(value):
            value, problem = None, problem or f"the reward is {value}"
        row = (self.incarnation, scored.group, scored.member, value, pack_json(reward.parts), clean(problem), now)
        self._rows["verdicts"].append(row)

    def _on_keep(self, keep: Keep, now: float) -> None:
        """Only what comes from an earlier life is news."""
        for done in keep.group.rollouts if keep.recovered else ():
            self._on_completion(Score(keep.group.prompt, done.completion), now)
            self._on_verdict(Scored(keep.group.id, done.completion.member, done.reward), now)

    def _on_drop(self, drop: Drop, now: float) -> None:
        row = (self.incarnation, drop.group, drop.member, drop.reason.value, clean(drop.cause), now)
        self._rows["drops"].append(row)

    def _on_batch(self, train: Train, now: float) -> None:
        self._rows["batches"].append((self.incarnation, train.step, now))
        groups = ((self.incarnation, train.step, position, group.id) for position, group in enumerate(train.groups))
        self._rows["batch_groups"].extend(groups)

    def _on_trained(self, event: BatchTrained, now: float) -> None:
        self._rows["batches_trained"].append((now, self.incarnation, event.version.step - 1))

    def _on_published(self, event: Published, now: float) -> None:
        self._rows["versions"].append((self.incarnation, *event.version, now))

    def _on_engine_up(self, event: EngineUp, now: float) -> None:
        self._engine(event.engine, "up", event.version, f"{event.slots} slots", now)

    def _on_request_failed(self, event: RequestFailed, now: float) -> None:
        group, member, attempt = event.request
        text = f"group {group}, member {member}, attempt {attempt}: {event.cause}"
        self._engine(event.engine, "request failed", None, text, now)

    def _engine(self, engine: str, event: str, version: WeightVersion | None, text: str, now: float) -> None:
        row = (self.incarnation, engine, event, *(version or (None, None)), clean(text), now)
        self._rows["engine_events"].append(row)

    def _on_finish(self, finish: Finish, now: float) -> None:
        self._rows["endings"].append((now, clean(finish.cause), int(finish.failed), self.incarnation))

    # --------------------------------------------------------------------------------------------- writing

    def flush(self) -> None:
        """Write the buffered rows in one transaction. Call it at least every second.

        Raises JournalError when that fails (disk full, locked, broken file); the rows then stay buffered.
        """
        self._flushed = time.monotonic()
        if not any(self._rows.values()):
            return
        with guarded(self._path), self._transaction():
            for table, rows in self._rows.items():
                if rows:
                    self._connection.executemany(INSERTS[table], rows)
        for rows in self._rows.values():
            rows.clear()

    def commit_checkpoint(self, version: WeightVersion, folder: str, prompt_cursor: int, counters: Mapping[str, object]) -> None:
        """Name a checkpoint that is complete on disk. From here on a resume starts there.

        One transaction with everything still buffered, synced to the disk before it returns.

        Args:
            version: the weights it holds.
            folder: its folder, relative to the run's.
            prompt_cursor: prompts taken from the source.
            counters: running totals to go on from.

        Raises:
            JournalError: the checkpoint does not count.
        """
        row = (self.incarnation, *version, folder, prompt_cursor, pack_json(counters), self._clock())
        self._rows["checkpoints"].append(row)
        with guarded(self._path):
            self._connection.execute("PRAGMA synchronous = FULL")
        try:
            self.flush()
        except JournalError:
            self._rows["checkpoints"].clear()
            raise
        finally:
            with guarded(self._path):
                self._connection.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        """Write what is buffered and close the file, folding the write-ahead log into it."""
        try:
            self.flush()
        finally:
            with guarded(self._path):
                self._connection.close()
