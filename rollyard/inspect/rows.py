"""The metrics of a run, read on as they are written."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Lock
from typing import Any

from rollyard.inspect.source import metrics_line


class MetricRows:
    """Lines of `metrics.jsonl` by step; of a step that was trained again the last one counts.

    The file only grows, but for the beginning of a life, which puts another one in its place. Any thread may ask.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, Lock()
        self._file: tuple[int, int] | None = None
        self._read = 0
        self._rows: dict[int, dict[str, Any]] = {}
        self.files = 0  # that were put in its place: with a new life, all rows may be others

    def rows(self) -> list[dict[str, Any]]:
        """All so far, in the order of their steps. Raises OSError."""
        with self._lock:
            try:
                file = self._path.open("rb")
            except FileNotFoundError:
                return []
            with file:
                about = os.fstat(file.fileno())
                if self._file != (about.st_dev, about.st_ino) or about.st_size < self._read:
                    self.files += self._file is not None
                    self._file, self._read, self._rows = (about.st_dev, about.st_ino), 0, {}
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # it is being written
                    self._read += len(line)
                    found = metrics_line(line)
                    if found is not None:
                        self._rows[found["step"]] = found
            return [self._rows[step] for step in sorted(self._rows)]
