"""The run that is looked at: where its files are, and which of its lives are meant."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rollyard.errors import ConfigError, JournalError
from rollyard.journal.folder import CHECKPOINTS, JOURNAL, RunFolder
from rollyard.journal.journal import check_format, guarded, is_stopped
from rollyard.journal.quiet import connect, is_settled
from rollyard.journal.schema import LOST, OWN
from rollyard.texts import counted

REMEDY = "give the folder of a run, such as runs/NAME"

# What survived, as the views of the journal say it. As tables, since it is asked for every row.
SURVIVING = (
    f"CREATE TEMP TABLE own AS {OWN}",
    "CREATE UNIQUE INDEX temp.own_group ON own (group_id, incarnation)",
    f"""CREATE TEMP TABLE own_batch AS SELECT step, incarnation FROM batches b
    WHERE NOT {LOST.format(life="b.incarnation", step="b.step")}""",
    "CREATE UNIQUE INDEX temp.own_step ON own_batch (step, incarnation)",
)


@dataclass(frozen=True, slots=True)
class Lives:
    """Which lives of a run are meant: one, or each of them, or of all what has survived (which is what neither says)."""

    one: int | None = None
    each: bool = False


def find(run: Path) -> RunFolder:
    """The folder of a run, or that of its journal. Raises ConfigError when there is none, or never was a run."""
    if run.is_file() and run.name == JOURNAL:
        return RunFolder(run.parent)
    if not run.is_dir():
        raise ConfigError("there is no such folder", where=str(run), remedy=REMEDY)
    if (run / "agreed").is_dir() and not (run / JOURNAL).exists():
        problem = "this is what two jobs share, and the journal is elsewhere"
        raise ConfigError(problem, where=str(run), remedy="give the generation job's own folder, such as runs/NAME")
    folder = RunFolder(run)
    if not any(path.exists() for path in (folder.journal, folder.config, folder.scenario)):
        raise ConfigError("this is not the folder of a run", where=str(run), remedy=REMEDY)
    return folder


class Source:
    """The journal of a run as it is at one moment, open for reading as long as the block lasts.

    Raises:
        ConfigError: it has no such life.
        JournalError: it is not there, cannot be read, or is of an unknown format; from any call: what was asked for is damaged.
    """

    def __init__(self, folder: RunFolder, lives: Lives = Lives()) -> None:
        self.folder, self.lives = folder, lives
        self._path = folder.journal
        if not self._path.exists() or not self._path.stat().st_size:
            raise JournalError(f"{self._path}: there is no journal: the run did not come so far")
        self._stamp = self._path.stat().st_mtime_ns if is_settled(self._path) else None
        self._connection = connect(self._path)
        try:
            self._begin()
        except BaseException:
            self._connection.close()
            raise

    def _begin(self) -> None:
        with guarded(self._path):
            check_format(self._connection, self._path)
            self._connection.execute("PRAGMA temp_store = MEMORY")
            self._connection.execute("BEGIN")  # one moment of a run that goes on
            self.known: tuple[int, ...] = tuple(life for (life,) in self.rows("SELECT incarnation FROM incarnations ORDER BY 1"))
            for statement in SURVIVING if self._several else ():
                self._connection.execute(statement)
        if self.lives.one is not None and self.lives.one not in self.known:
            problem = f"the run has no life {self.lives.one}"
            raise ConfigError(problem, where="--life", remedy=f"it has {', '.join(map(str, self.known))}")

    @property
    def _several(self) -> bool:
        return self.lives == Lives() and len(self.known) > 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()

    def check_unchanged(self) -> None:
        """Raises JournalError when somebody began to write to the file that was taken for settled."""
        if self._stamp is not None and self._path.stat().st_mtime_ns != self._stamp:
            raise JournalError(f"{self._path}: a run began to write to it meanwhile; ask again")

    # --------------------------------------------------------------------------------------------- journal

    def rows(self, sql: str, *parameters: object) -> Iterator[tuple[Any, ...]]:
        """Rows of a SELECT, one after the other."""
        with guarded(self._path):
            for row in self._connection.execute(sql, parameters):  # noqa: UP028 (see below)
                yield row

    def row(self, sql: str, *parameters: object) -> tuple[Any, ...]:
        """The first one. There is one."""
        return next(self.rows(sql, *parameters))

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Values of columns that are not what they should be as JournalError."""
        try:
            yield
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError, struct.error) as error:
            raise JournalError(f"{self._path}: a value is not what it should be: {error}") from error

    def of_groups(self, table: str) -> str:
        """The condition for rows of a table with `incarnation` and `group_id` to be of the lives that are meant."""
        return self._condition(table, "own", "group_id")

    def of_steps(self, table: str) -> str:
        """The same for one with `incarnation` and `step`."""
        return self._condition(table, "own_batch", "step")

    def of_lives(self, table: str) -> str:
        """The same for one that has neither: of what goes with the run, not with a group, every life counts."""
        return "TRUE" if self.lives.one is None else f"{table}.incarnation = {self.lives.one}"

    def _condition(self, table: str, own: str, key: str) -> str:
        if self.lives.one is not None:
            return f"{table}.incarnation = {self.lives.one}"
        if not self._several:
            return "TRUE"
        return f"EXISTS (SELECT 1 FROM temp.{own} o WHERE o.{key} = {table}.{key} AND o.incarnation = {table}.incarnation)"

    def only_read(self, sql: str) -> tuple[tuple[str, ...], Iterator[tuple[Any, ...]]]:
        """Names and rows of a user's SELECT. Raises ConfigError for what is none, or what SQLite does not understand."""
        self._connection.set_authorizer(_may)
        try:
            cursor = self._connection.execute(sql)
            names = tuple(column[0] for column in cursor.description or ())
            problem = "" if names else "that is no SELECT"
        except (sqlite3.Error, sqlite3.Warning, UnicodeDecodeError) as error:
            if is_stopped(error):
                raise KeyboardInterrupt from None
            problem = str(error)
        if problem:
            raise ConfigError(problem, where="--sql", remedy="give one SELECT; docs/journal.md has tables and views")
        return names, self._guarded(cursor)

    def _guarded(self, cursor: sqlite3.Cursor) -> Iterator[tuple[Any, ...]]:
        with guarded(self._path):
            for row in cursor:  # noqa: UP028 (who stops early would close the cursor, and that maybe after its connection)
                yield row


READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}


def _may(action: int, name: str | None, *_: str | None) -> int:
    """Nothing but reading: a connection that may not write could still attach another file, or copy this one.

    Functions that are used as tables, such as json_each, tell SQLite what columns they have, which looks like a change of the
    schema; a real one the connection refuses.
    """
    declares = action == sqlite3.SQLITE_UPDATE and name == "sqlite_master"
    return sqlite3.SQLITE_OK if declares or action in READS else sqlite3.SQLITE_DENY


# ------------------------------------------------------------------------------------------ the files beside it


@dataclass(frozen=True, slots=True)
class Metrics:
    """Lines of `metrics.jsonl`, and how many of its lines are none."""

    lines: tuple[dict[str, Any], ...] = ()
    broken: int = 0


def read_metrics(folder: RunFolder, lives: Lives) -> Metrics:
    """Those of the lives that are meant; of a step that was trained again the last one counts. Raises OSError."""
    if not folder.metrics.exists():
        return Metrics()
    kept: dict[object, dict[str, Any]] = {}
    broken = 0
    with folder.metrics.open("rb") as file:
        for line in file:
            found = metrics_line(line)
            if found is None:
                broken += 1
            elif lives.one in (None, found["incarnation"]):
                kept[(found["step"], found["incarnation"]) if lives.each else found["step"]] = found
    return Metrics(tuple(sorted(kept.values(), key=lambda line: (line["step"], line["incarnation"]))), broken)


def metrics_line(line: bytes) -> dict[str, Any] | None:
    """None for one that was not written to its end, or by somebody else."""
    try:
        found = json.loads(line, parse_int=counted)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(found, dict) and type(found.get("step")) is int and type(found.get("incarnation")) is int
    return found if whole else None


def read_config(folder: RunFolder) -> dict[str, Any] | None:
    """The resolved config as it was written, or the scenario; None where it is not there, or damaged."""
    path = folder.scenario if folder.scenario.exists() else folder.config
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def saved(folder: RunFolder) -> dict[str, Path]:
    """Folders of checkpoints that are there, by what the journal calls them, oldest first; also those that two jobs share.

    So what the journal says is looked up, and no name in it becomes a path.
    """
    exchange = (read_config(folder) or {}).get("exchange")
    shared = exchange.get("folder") if isinstance(exchange, dict) else ""
    places = {CHECKPOINTS: folder.path / CHECKPOINTS}
    if isinstance(shared, str) and shared and "\0" not in shared:
        places[f"{shared}/weights"] = Path(shared) / "weights"
    return {f"{name}/{path.name}": path for name, place in places.items() for path in _folders(place)}


def _folders(place: Path) -> list[Path]:
    try:
        return sorted(path for path in place.iterdir() if path.is_dir() and path.name[0] != ".")
    except OSError:
        return []


def goes_on(folder: RunFolder) -> bool:
    """Does a process of this machine hold the folder, as a run does while it lives? Looked up, so that no lock is taken."""
    try:
        found = folder.path.stat()
        locks = Path("/proc/locks").read_text(encoding="ascii").splitlines()
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    held = {line.split()[5] for line in locks if " FLOCK " in line and "->" not in line}
    devices = {f"{os.major(found.st_dev)}:{os.minor(found.st_dev)}", _device(folder.path.resolve(), mounts)}
    numbers = [device.split(":") for device in devices if device]
    return any(f"{int(major):02x}:{int(minor):02x}:{found.st_ino}" in held for major, minor in numbers)


def _device(path: Path, mounts: list[str]) -> str:
    """Of the file system that it lies on, as the kernel calls it: what `stat` says of some, such as btrfs, is another."""
    places = {words[4]: words[2] for words in map(str.split, mounts)}
    return next((places[str(each)] for each in (path, *path.parents) if str(each) in places), "")
