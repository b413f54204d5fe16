"""Reads the journal of a finished or a running run, without disturbing it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollyard.errors import JournalError
from rollyard.journal.decode import COMPLETION, PROMPT, VERDICT, completion_of, prompt_of, reward_of
from rollyard.journal.journal import check_format, guarded
from rollyard.journal.quiet import connect
from rollyard.types import Group, Prompt, Rollout, WeightVersion


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of a run. `ended_at`, `cause` and `failed` are None while it lives, or when it was killed."""

    incarnation: int
    name: str
    rollyard: str
    seed: int
    group_size: int
    config: str  # JSON
    started_at: float
    begun: WeightVersion | None  # where it began, None when it ended before that was known
    ended_at: float | None
    cause: str | None
    failed: bool | None


def has_lives(path: Path) -> bool:
    """Has a life of the run begun? Not where it was killed before it had made its journal, or before it said so there.

    Raises JournalError when the file cannot be read.
    """
    if not path.is_file():
        return False
    with guarded(path), closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        try:
            (made,) = connection.execute("PRAGMA schema_version").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_READONLY_ROLLBACK:  # it was killed while it made the file
                return False
            raise
        if not made:
            return False
        check_format(connection, path)
        (lives,) = connection.execute("SELECT count(*) FROM incarnations").fetchone()
        return bool(lives)


class JournalReader:
    """The journal of one incarnation, read-only; the newest unless said otherwise. A context manager.

    Raises:
        JournalError: there is no such file or incarnation, or the file is no journal of a known format.
    """

    def __init__(self, path: Path, incarnation: int | None = None) -> None:
        self._path = path
        if not path.is_file():
            raise JournalError(f"{path}: no such file")
        self._connection = connect(path)
        try:
            with guarded(path):
                check_format(self._connection, path)
        except BaseException:
            self._connection.close()
            raise
        lives = {life.incarnation: life for life in self.incarnations()}
        chosen = max(lives, default=0) if incarnation is None else incarnation
        if chosen not in lives:
            self.close()
            problem = f"no incarnation {chosen}, only {', '.join(map(str, lives))}" if lives else "no run has begun in it"
            raise JournalError(f"{path}: {problem}")
        self.incarnation = lives[chosen]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def still(self) -> Iterator[None]:
        """All that is read in this block is as it was at one moment, also while the run goes on."""
        with guarded(self._path):
            self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.rollback()

    def query(self, sql: str, *parameters: object) -> Iterator[tuple[Any, ...]]:
        """Rows of any SELECT. The tables and views are described in `rollyard.journal.schema`."""
        with guarded(self._path):
            yield from self._connection.execute(sql, parameters)

    def _mine(self, sql: str, *parameters: object) -> Iterator[tuple[Any, ...]]:
        """Rows of this incarnation: the statement's first parameter."""
        return self.query(sql, self.incarnation.incarnation, *parameters)

    def incarnations(self) -> tuple[Incarnation, ...]:
        rows = self.query("SELECT * FROM incarnations ORDER BY incarnation")
        return tuple(_incarnation(*row) for row in rows)

    def prompt(self, group: int) -> Prompt:
        for row in self._mine(f"SELECT {PROMPT} FROM prompts p WHERE incarnation = ? AND group_id = ?", group):
            return prompt_of(*row)
        raise JournalError(f"{self._path}: prompt {group} was not admitted")

    def group(self, group: int) -> Group:
        """A prompt with its judged completions so far, by member, those that were dropped later included."""
        sql = f"""
            SELECT {COMPLETION}, {VERDICT}
            FROM completions c JOIN verdicts v USING (incarnation, group_id, member)
            WHERE incarnation = ? AND group_id = ? ORDER BY member"""
        rollouts = (Rollout(completion_of(*row[:10]), reward_of(*row[10:])) for row in self._mine(sql, group))
        return Group(self.prompt(group), tuple(rollouts))

    def batches(self) -> dict[int, tuple[int, ...]]:
        """Group ids of each batch taken, in order, by the step that trains it."""
        batches: dict[int, list[int]] = {}
        sql = "SELECT step, group_id FROM batch_groups WHERE incarnation = ? ORDER BY step, position"
        for step, group in self._mine(sql):
            batches.setdefault(step, []).append(group)
        return {step: tuple(groups) for step, groups in batches.items()}


def _incarnation(*row: Any) -> Incarnation:
    about, (begun, life, ended_at, cause, failed) = row[:7], row[7:]
    version = None if begun is None else WeightVersion(begun, life)
    return Incarnation(*(*about, version, ended_at, cause, None if failed is None else bool(failed)))
