"""What lies beside a run's journal, as far as it goes beyond what the journal knows, or falls short of it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from rollyard.durable import is_whole
from rollyard.errors import JournalError
from rollyard.journal.folder import CHECKPOINTS, RunFolder, age, is_checkpoint
from rollyard.journal.reader import Incarnation, JournalReader

NEWEST: Final = "SELECT version_step, folder FROM checkpoints ORDER BY rowid DESC LIMIT 1"
TRAINED: Final = "SELECT ifnull(max(step) + 1, 0) FROM batches WHERE trained_at IS NOT NULL"
KEPT: Final = """
    SELECT max(begun_step, ifnull((SELECT max(version_step) FROM checkpoints c WHERE c.incarnation = i.incarnation), 0))
    FROM incarnations i WHERE begun_step IS NOT NULL ORDER BY incarnation DESC LIMIT 1"""
SHOWN: Final = 5  # ranges of steps that are told


@dataclass(frozen=True, slots=True)
class LostEnd:
    """There is more of the run than its journal knows.

    Args:
        trained: steps that the journal knows.
        checkpoints: folders that were sealed and that it does not name, newer than those that it does; the oldest first.
        seen: the last step that there are metrics of.
    """

    trained: int
    checkpoints: tuple[Path, ...]
    seen: int

    def __str__(self) -> str:
        found = [path.name for path in self.checkpoints]
        found += [f"metrics of step {self.seen}"] if self.seen > self.trained else []
        return f"it has lost its end: it knows {self.trained} steps, and beside it there are {', '.join(found)}"


def lost_end(folder: RunFolder) -> LostEnd | None:
    """Is there more of the run than its journal knows, other than what is usual when it was killed, or lost its power?

    That is: the newest checkpoint has no name yet, and metrics go on up to where the next one would have been named.

    Raises JournalError, or OSError where the metrics cannot be read.
    """
    seen = max(rows_by_step(folder.metrics), default=0)  # before the journal: the run may go on meanwhile
    there = [path for path in folder.checkpoints() if is_whole(path)]
    with JournalReader(folder.journal) as journal:
        every = max(_every(life) for life in journal.incarnations())
        names = {name for (name,) in journal.query("SELECT folder FROM checkpoints")}
        ((trained,),) = journal.query(TRAINED)
        step, newest = next(journal.query(NEWEST), (0, ""))
    oldest = age(Path(newest)) if is_checkpoint(newest) else (0, 0)
    unnamed = tuple(path for path in there if f"{CHECKPOINTS}/{path.name}" not in names and age(path) > oldest)
    if len(unnamed) > 1 or seen > max(trained, step + every + 1):  # metrics of one step more may be written meanwhile
        return LostEnd(trained, unnamed, seen)
    return None


def kept_steps(folder: RunFolder) -> int:
    """Steps that the newest checkpoint of what survives was trained on. Raises JournalError."""
    with JournalReader(folder.journal) as journal:
        return int(next(journal.query(KEPT), (0,))[0])


def without_metrics(folder: RunFolder, steps: int) -> str:
    """Which of a run's first steps have no metrics, such as `8-12, 15`; empty: none. Raises OSError."""
    absent = sorted({*range(1, steps + 1)} - rows_by_step(folder.metrics).keys())
    ranges = [[step for _, step in run] for _, run in groupby(enumerate(absent), key=lambda each: each[1] - each[0])]
    told = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ranges]
    return ", ".join(told[:SHOWN]) + (", ..." if len(told) > SHOWN else "")


def rows_by_step(metrics: Path) -> dict[int, tuple[bytes, dict[str, Any]]]:
    """Lines of a file of metrics, and what they say. Of a step that was done more than once the last one counts.

    A line that was not written to its end is left out. Raises OSError when the file is there and cannot be read.
    """
    found: dict[int, tuple[bytes, dict[str, Any]]] = {}
    for line in _lines(metrics):
        try:
            record = json.loads(line)
            found[int(record["step"])] = line, record
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return found


def _lines(path: Path) -> Iterable[bytes]:
    try:
        return path.read_bytes().splitlines()
    except FileNotFoundError:
        return ()


def options_of(life: Incarnation) -> dict[str, Any]:
    """What a life was given, as JSON has it. Raises JournalError when the journal has it damaged."""
    try:
        found = json.loads(life.config)
    except (ValueError, RecursionError) as error:
        raise JournalError(f"the config of life {life.incarnation} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise JournalError(f"the config of life {life.incarnation} is damaged: it is no object")
    return found


def _every(life: Incarnation) -> float:
    """Steps from one checkpoint to the next."""
    try:
        found = options_of(life).get("checkpoint", {}).get("every", 0)
    except (JournalError, AttributeError):
        return math.inf
    return found if isinstance(found, int) and found > 0 else math.inf
