"""Somewhere metrics go. A sink that fails is given up with one warning; it never stops a run."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollyard.durable import write_file
from rollyard.journal.beside import rows_by_step
from rollyard.protocols.devices import Tracked


class JsonlSink:
    """Appends one JSON object a line, such as `metrics.jsonl`. Whole lines reach the file with each write.

    A number that is not finite is written as the text "nan", "inf" or "-inf": JSON has no such numbers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed = False

    @property
    def takes_back(self) -> bool:
        """See `cut`."""
        return True

    def open(self, run: Tracked) -> str:
        """There is nothing to open."""
        return ""

    def write(self, record: Mapping[str, object]) -> None:
        if self._failed:
            return
        try:
            told = line(record)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(told)
        except (OSError, TypeError, ValueError) as error:
            self._failed = True
            warnings.warn(f"no more metrics are written to {self._path}: {error}", RuntimeWarning, stacklevel=2)

    def evaluated(self, record: Mapping[str, object]) -> None:
        """The file has steps only; evaluations are in the journal."""

    def close(self, summary: Mapping[str, object], failed: bool) -> None:
        """Nothing is left to write."""


def line(record: Mapping[str, object]) -> str:
    """Of a record, as metrics.jsonl has it. Raises TypeError, ValueError for what JSON has no words for."""
    return json.dumps({name: _finite(value) for name, value in record.items()}, allow_nan=False) + "\n"


def cut(path: Path, step: int) -> tuple[dict[str, Any], ...]:
    """Keep the records of steps up to this one, and return them; the file is replaced, whole or not at all.

    Of a step that was done more than once the last record counts. A line that was not written to its end is left out.

    Raises OSError when the file cannot be written.
    """
    if not path.exists():
        return ()
    found = rows_by_step(path)
    kept = [found[each] for each in sorted(found) if each <= step]
    write_file(path, b"".join(line + b"\n" for line, _ in kept))
    return tuple(record for _, record in kept)


def _finite(value: object) -> object:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
