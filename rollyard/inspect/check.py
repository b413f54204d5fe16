"""What of a run is sound: all that its journal says, and the files beside it that say something about the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollyard.durable import check_whole
from rollyard.errors import DurableError
from rollyard.inspect.overview import overview
from rollyard.inspect.source import Lives, saved
from rollyard.journal.check import Sound, check_journal
from rollyard.journal.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, whether it is sound, and what was found."""

    what: str
    sound: bool
    text: str


def check(folder: RunFolder) -> Iterator[Finding]:
    """All there is to find. Reads the whole journal, and every checkpoint as far as its sizes and heads tell."""
    there = saved(folder)

    def whole(name: str) -> bool | None:
        if name not in there:
            return None
        try:
            check_whole(there[name])
        except DurableError:
            return False
        return True

    checked = check_journal(folder.journal, whole)
    yield from (Finding(f"table {table.table}", table.good == table.rows, _rows(table)) for table in checked.tables)
    yield from (Finding(found.kind, False, found.text) for found in checked.findings)
    seen = overview(folder, Lives())
    for name in ("config.toml", "metrics.jsonl"):
        problem = seen.unreadable.get(name)
        yield Finding(name, not problem, problem or "readable")
    for point in seen.checkpoints or ():
        yield Finding(point.folder, point.state in ("whole", "removed"), point.state)
    if not checked.findings:
        yield Finding("journal", True, f"a later life would begin with {checked.checkpoint or 'the first version'}")


def _rows(table: Sound) -> str:
    if table.rows is None:
        return f"{table.good:,} rows, and it cannot be read to its end"
    rows = f"{table.rows:,} rows"
    return rows if table.good == table.rows else f"{table.good:,} of {rows} are as they were written"
