"""How a run stands: whether it goes on, and which of its files say how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rollyard.dashboard.told import FAILED, FINISHED, KILLED, RUNNING, SIMULATED
from rollyard.errors import JournalError
from rollyard.inspect.overview import Life, Overview, overview
from rollyard.inspect.source import Lives, goes_on
from rollyard.journal.folder import RunFolder
from rollyard.watch.read import read_report
from rollyard.watch.report import Report

NO_END: Final = "no end: it was killed, or goes on elsewhere"
BRIEF: Final = ("lives", "problems")  # what is asked of the journal while the run says the rest itself
NOT_BEGUN: Final = "it ended before it had begun"


@dataclass(frozen=True, slots=True)
class State:
    """`report` where it is that of the last life."""

    name: str
    cause: str
    report: Report | None
    seen: Overview | None  # of the journal, in brief while the run goes on; None of a run that was simulated
    why: str = ""  # the report cannot be read


def state_of(folder: RunFolder) -> State:
    """As it is now. Raises JournalError, OSError where a simulated run has no report."""
    if going(folder):
        return State(RUNNING, "", None, overview(folder, Lives(), BRIEF))
    if folder.scenario.exists():
        simulated = read_report(folder.report)
        return State(SIMULATED, simulated.finished.cause, simulated, None)
    seen = overview(folder, Lives())
    report, why = _report(folder)
    lives = seen.lives or ()
    if report is not None and not _is_of(report, lives):
        report = None
    if lives and lives[-1].ended_at is None:
        return State(KILLED, NO_END, report, seen, why)
    if lives:
        return State(FAILED if lives[-1].failed else FINISHED, lives[-1].cause or "", report, seen, why)
    if report is not None:  # its journal could not be written, or is damaged
        return State(FAILED if report.finished.failed else FINISHED, report.finished.cause, report, seen)
    return State(KILLED, NOT_BEGUN, None, seen, why)


def going(folder: RunFolder) -> bool:
    """Does the run go on? Far quicker than all of the state."""
    return not folder.scenario.exists() and goes_on(folder)


def _report(folder: RunFolder) -> tuple[Report | None, str]:
    if not folder.report.exists():
        return None, ""
    try:
        return read_report(folder.report), ""
    except (JournalError, OSError) as error:
        return None, str(error)


def _is_of(report: Report, lives: Sequence[Life]) -> bool:
    """Does it say what these lives came to? One that was killed, or ended in its start, leaves that of an earlier one."""
    begun = [life for life in lives if life.begun is not None]
    return not lives or report.lives.count == max(len(begun), 1)


def named(config: dict[str, Any], name: str) -> Any:
    """The value of an option in a config that was read; None where it is not there."""
    found: Any = config
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
