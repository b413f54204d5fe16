"""How a worker process for users' code is set up: code that may print, start, and end whatever it likes."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rollyard.environment import python_variables, take_python_variables

PRIVATE = 0o600
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
    faulthandler.enable(os.dup(2), all_threads=False)  # it goes on to write there, see `heard`
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    prints = os.open(given.prints, os.O_CREAT | os.O_APPEND | os.O_WRONLY, PRIVATE)
    os.dup2(prints, 1)
    os.close(prints)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    take_python_variables(given.variables)
    sys.path[1:] = given.path  # the first is where this package is found


@contextmanager
def heard() -> Iterator[None]:
    """While a worker is ready, what is written to its stderr goes where its prints go.

    Before, its end is the cause that is told of a process that dies; so it is of a host that fails.
    """
    sys.stderr.flush()
    messages = os.dup(2)
    os.dup2(1, 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(messages, 2)
        os.close(messages)
