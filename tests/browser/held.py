"""A reward that takes its time, until a file is there: a run goes on for as long as a test looks at it."""

from __future__ import annotations

import os
import time
from pathlib import Path

FILE = "ROLLYARD_TEST_GO"  # the variable that names it


def slow(prompt: str, completion: str) -> float:
    if not Path(os.environ[FILE]).exists():
        time.sleep(0.05)
    return float(len(completion) % 2)
