"""What of a run is sound: every page of the journal is read, and every file beside it that says something about the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from rollyard.errors import JournalError
from rollyard.inspect.overview import overview
from rollyard.inspect.source import Lives, Source
from rollyard.journal.folder import RunFolder

TABLES = "SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY rowid"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, whether it is sound, and what was found."""

    what: str
    sound: bool
    text: str


def check(folder: RunFolder) -> Iterator[Finding]:
    """All there is to find, in the order it is looked at. Reads the whole journal."""
    try:
        with Source(folder, Lives(each=True)) as source:
            yield from _journal(source)
    except JournalError as error:
        yield Finding("journal", False, str(error))
    seen = overview(folder, Lives())
    for name in ("config.toml", "metrics.jsonl"):
        if problem := seen.unreadable.get(name):
            yield Finding(name, False, problem)
        else:
            yield Finding(name, True, f"{len(seen.rewards)} steps" if name == "metrics.jsonl" else "readable")
    for point in seen.checkpoints or ():
        yield Finding(point.folder, point.state in ("whole", "removed", "unsealed"), point.state)


def _journal(source: Source) -> Iterator[Finding]:
    yield _look("journal", lambda: _integrity(source))
    yield _look("references", lambda: _references(source))
    for (table,) in source.rows(TABLES):
        yield _look(f"table {table}", partial(_count, source, table))


def _look(what: str, look: Callable[[], tuple[bool, str]]) -> Finding:
    """One damaged part leaves the others to be looked at."""
    try:
        return Finding(what, *look())
    except JournalError as error:
        return Finding(what, False, str(error))


def _integrity(source: Source) -> tuple[bool, str]:
    lines = [line for (line,) in source.rows("PRAGMA integrity_check(20)")]
    return lines == ["ok"], "every page and every index" if lines == ["ok"] else "; ".join(lines)


def _references(source: Source) -> tuple[bool, str]:
    astray = [f"{table}, row {row}, has none in {parent}" for table, row, parent, _ in source.rows("PRAGMA foreign_key_check")]
    return not astray, "; ".join(astray[:20]) or "every row has those that it refers to"


def _count(source: Source, table: str) -> tuple[bool, str]:
    name = table.replace('"', '""')
    (count,) = source.row(f'SELECT count(*) FROM "{name}" NOT INDEXED')
    return True, f"{count:,} rows"
