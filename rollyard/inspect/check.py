"""What of a run is sound: all that its journal says, and the files beside it that say something about the run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollyard.durable import check_whole
from rollyard.errors import ConfigError, DurableError, JournalError
from rollyard.inspect.overview import overview
from rollyard.inspect.source import Lives, saved
from rollyard.journal.beside import kept_steps, lost_end, without_metrics
from rollyard.journal.check import Sound, check_journal
from rollyard.journal.folder import CONFIG, JOURNAL, METRICS, RunFolder
from rollyard.layers import resolve
from rollyard.resume import changed_options


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
    beside = (*_beside(folder), *_edited(folder))
    problems = (*seen.unreadable.items(), *beside)
    for name in (CONFIG, METRICS):
        problem = "; ".join(text for what, text in problems if what == name)
        yield Finding(name, not problem, problem or "readable")
    yield from (Finding(JOURNAL, False, text) for what, text in beside if what == JOURNAL)
    for point in seen.checkpoints or ():
        yield Finding(point.folder, point.state in ("whole", "removed"), point.state)
    if not checked.findings:
        yield Finding("journal", True, f"a later life would begin with {checked.checkpoint or 'the first version'}")


def _beside(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """What lies beside the journal, where it goes beyond it or falls short of it: a file, and what is wrong with it."""
    try:
        steps = kept_steps(folder)  # before the metrics are read: the run may go on meanwhile
        absent, lost = without_metrics(folder, steps), lost_end(folder)
    except (JournalError, OSError):
        return  # that it cannot be read has been found
    if absent:
        yield METRICS, f"it has no rows of steps {absent}"
    if lost is not None:
        yield JOURNAL, str(lost)


def _edited(folder: RunFolder) -> Iterator[tuple[str, str]]:
    """Options that somebody has changed, and that may not be. Two jobs that share a folder may have others each time."""
    try:
        config = resolve(file=folder.config, environment={}).config
        if not config.exchange.folder:
            yield from ((CONFIG, f"{error.where}: {error.problem}") for error in changed_options(folder, config))
    except (ConfigError, JournalError):
        return  # one that cannot be read is told elsewhere


def _rows(table: Sound) -> str:
    if table.rows is None:
        return f"{table.good:,} rows, and it cannot be read to its end"
    rows = f"{table.rows:,} rows"
    return rows if table.good == table.rows else f"{table.good:,} of {rows} are as they were written"
