"""What of a run is sound: every page of the journal is read, and every file beside it that says something about the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    lines = [line for (line,) in source.rows("PRAGMA integrity_check(20)")]
    yield Finding("journal", lines == ["ok"], "every page and every index" if lines == ["ok"] else "; ".join(lines))
    astray = [f"{table}, row {row}, has none in {parent}" for table, row, parent, _ in source.rows("PRAGMA foreign_key_check")]
    told = "every row has those that it refers to" if not astray else "; ".join(astray[:20])
    yield Finding("references", not astray, told)
    for (table,) in source.rows(TABLES):
        try:
            (count,) = source.row('SELECT count(*) FROM "{}"'.format(table.replace('"', '""')))
            yield Finding(f"table {table}", True, f"{count:,} rows")
        except JournalError as error:
            yield Finding(f"table {table}", False, str(error))
