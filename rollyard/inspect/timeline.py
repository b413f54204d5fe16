"""A picture of what every device did, from what a run keeps of it while it goes on, and leaves at its end."""

from __future__ import annotations

from pathlib import Path

from rollyard.durable import write_file
from rollyard.errors import ConfigError, JournalError
from rollyard.journal.folder import RunFolder
from rollyard.watch.kept import read_kept, traces_last, with_trace
from rollyard.watch.picture import picture
from rollyard.watch.read import read_report

WHERE = "--timeline"


def draw(folder: RunFolder, path: Path) -> int:
    """Write it; returns how many devices there were.

    Raises:
        ConfigError: the file's name says another format, it is there already, or among the run's.
        JournalError: the run has no timeline, or one that cannot be read; OSError: the file cannot be written.
    """
    if path.suffix != ".svg":
        raise ConfigError(f"{path.name!r} says no format that is known", where=WHERE, remedy="give a name that ends with .svg")
    if path.exists():
        raise ConfigError(f"{path} exists already", where=WHERE, remedy="give another name")
    if folder.path.resolve() in path.resolve().parents:
        raise ConfigError(f"{path} would be in the run's own folder", where=WHERE, remedy="give a name elsewhere")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no folder {path.parent}", where=WHERE, remedy="make it, or give another name")
    kept = read_kept(folder.timeline)
    if traces_last(kept, folder.trace):
        traced = with_trace(kept, folder.trace)
    elif kept is not None:
        traced = kept.traced
    else:
        raise JournalError(f"{folder.timeline}: there is no timeline: a run keeps one from the end of its setup on")
    name = read_report(folder.report).name if folder.report.exists() else folder.path.resolve().name
    write_file(path, picture(name, traced).encode())
    return traced.devices
