"""How a worker process for users' code is set up: code that may print, start, and end whatever it likes."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from rollyard.environment import python_variables, take_python_variables

PRIVATE = 0o600
LOG_BYTES = 2**24
FIRST_TO_GO = "1000"  # where memory runs out, the system ends a worker before anything else of the run


class Surroundings(NamedTuple):
    """What a worker takes over from the run's own process."""

    prints: str  # file that gets what it prints
    path: Sequence[str]  # where it finds modules
    variables: Mapping[str, str]  # of Python, for what it starts itself

    @classmethod
    def here(cls, prints: Path) -> Surroundings:
        """Those of this process."""
        return cls(str(prints), tuple(map(os.path.abspath, sys.path)), python_variables())


def settle(given: Surroundings) -> None:
    """In the worker, before it loads what is the user's: what it prints goes to a file, and what ends it is written down."""
    faulthandler.enable(all_threads=False)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    prints = os.open(given.prints, os.O_CREAT | os.O_APPEND | os.O_WRONLY, PRIVATE)
    os.dup2(prints, 1)
    os.close(prints)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    take_python_variables(given.variables)
    sys.path[1:] = given.path  # the first is where this package is found


def shorten(log: int = 2) -> None:
    """What is printed there stays for messages alone: its end is enough. To be called now and then."""
    if os.fstat(log).st_size > LOG_BYTES:
        os.ftruncate(log, 0)
        os.lseek(log, 0, os.SEEK_SET)
