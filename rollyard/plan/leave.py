"""The folder of a simulated run: report, metrics, trace and picture as those of a real one, and the scenario."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tomli_w

from rollyard.durable import is_full, make_folder, remove_folder
from rollyard.durable import write_folder as write_whole
from rollyard.errors import ConfigError
from rollyard.journal.folder import LENGTHS, METRICS, PICTURE, REPORT, SCENARIO, TRACE
from rollyard.plan.outcome import Outcome
from rollyard.plan.scenario import Scenario
from rollyard.watch.picture import picture
from rollyard.watch.sinks import line
from rollyard.watch.trace import write_trace


def check_free(folder: Path, overwrite: bool) -> None:
    """Raises ConfigError when the folder cannot be made: before anything is simulated."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir():
        raise ConfigError(f"{folder} is a file", where="run.out", remedy="give another folder")
    if not overwrite:
        remedy = "give another --out or --name, or --overwrite to replace it"
        raise ConfigError(f"{folder} exists already", where="run.out", remedy=remedy)
    if folder.is_symlink() or not (folder / SCENARIO).exists():
        problem = f"{folder} holds something else than a simulated run (no {SCENARIO} in it), so it is not replaced"
        raise ConfigError(problem, where="run.out", remedy="give another folder")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else simulates into it while the block lasts. A file beside it is locked, and gone afterwards.

    Raises ConfigError when somebody does, or nothing can be written there.
    """
    path = folder.absolute().with_name(f".{folder.absolute().name}.draft-held")
    try:
        make_folder(path.parent)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unwritable(error) from None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(handle).st_nlink:
                raise BlockingIOError  # who had it took it away in between
        except BlockingIOError:
            problem = f"another simulation is about to write {folder}"
            raise ConfigError(problem, where="run.out", remedy="wait for it, or give another --out") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def _unwritable(error: OSError) -> ConfigError:
    remedy = "make room there, or give another folder" if is_full(str(error)) else "give a folder that can be written"
    return ConfigError(f"cannot be written: {error}", where="run.out", remedy=remedy)


def write_folder(outcome: Outcome, scenario: Scenario, folder: Path) -> None:
    """All of it, or nothing; an earlier simulated run is replaced where `run.overwrite` says so.

    Raises ConfigError, see `check_free`, or when the folder cannot be written.
    """
    check_free(folder, scenario.run.overwrite)

    def write(draft: Path) -> None:
        (draft / SCENARIO).write_text(tomli_w.dumps(scenario.model_dump(mode="json")), encoding="utf-8")
        outcome.report.write(draft / REPORT)
        (draft / METRICS).write_text("".join(line(row) for row in outcome.metrics), encoding="utf-8")
        lengths = {"tokens": sorted(outcome.lengths), "completions": [outcome.lengths[each] for each in sorted(outcome.lengths)]}
        (draft / LENGTHS).write_text(json.dumps(lengths), encoding="utf-8")
        write_trace(draft / TRACE, outcome.traced)
        (draft / PICTURE).write_text(picture(outcome.report.name, outcome.traced), encoding="utf-8")
        if folder.is_dir():
            remove_folder(folder)  # not before all is written

    try:
        write_whole(folder, write)
    except OSError as error:
        raise _unwritable(error) from None
