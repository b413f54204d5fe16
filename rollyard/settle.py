"""How a worker process for users' code is set up: code that may print, start, and end whatever it likes."""

from __future__ import annotations

import faulthandler
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from rollyard.environment import python_variables, take_python_variables
from rollyard.errors import ConfigError

PRIVATE = 0o600
FIRST_TO_GO = "1000"  # where memory runs out, the system ends a worker before anything else of the run


class Surroundings(NamedTuple):
    """What a worker takes over from the run's own process."""

    prints: str  # file that gets what it prints
    path: Sequence[str]  # where it finds modules
    variables: Mapping[str, str]  # of Python, for what it starts itself
    memory_mib: int = 0  # that it may take, 0: no limit

    @classmethod
    def here(cls, prints: Path, memory_mib: int = 0) -> Surroundings:
        """Those of this process."""
        return cls(str(prints), tuple(map(os.path.abspath, sys.path)), python_variables(), memory_mib)


def settle(given: Surroundings, where: str) -> None:
    """In the worker, before it loads what is the user's: what it prints goes to a file, and what ends it is written down.

    Raises ConfigError when it has more memory than it may take already.

    Args:
        where: the option of that limit.
    """
    _messages.append(os.dup(2))  # where it goes on to write what ends it, see `heard`
    faulthandler.enable(_messages[-1], all_threads=False)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(FIRST_TO_GO)
    prints = os.open(given.prints, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, PRIVATE)
    os.dup2(prints, 1)
    os.close(prints)
    sys.stdout.reconfigure(line_buffering=True, errors="backslashreplace")  # type: ignore[union-attr]
    take_python_variables(given.variables)
    sys.path[1:] = given.path  # the first is where this package is found
    if given.memory_mib:
        _limit_memory(given.memory_mib, where)


# What a process allocates, not what it maps or only reserves, of which libraries for GPUs take more than there is: so not
# RLIMIT_AS. What it starts has the same limit, each process for itself.
LIMIT = resource.RLIMIT_DATA
_messages: list[int] = []


def _limit_memory(most_mib: int, where: str) -> None:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    taken_mib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:")) >> 10
    if taken_mib >= most_mib:
        problem = f"{most_mib} MiB are the most, and a worker takes {taken_mib} MiB before it has loaded anything"
        raise ConfigError(problem, where=where, remedy="give some hundred more, or 0 for no limit")
    hard = resource.getrlimit(LIMIT)[1]
    most = most_mib << 20
    resource.setrlimit(LIMIT, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def leave_if_full(error: BaseException) -> None:
    """In a worker with a memory limit, for what a user's code raised: one that has reached it ends here, with its calls.

    What it holds it may hold for ever, and the calls after this one would pay for it.
    """
    most = resource.getrlimit(LIMIT)[0]
    if isinstance(error, MemoryError) and most != resource.RLIM_INFINITY:
        os.write(_messages[-1], f"MemoryError: more than {most >> 20} MiB\n".encode())
        os._exit(1)


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
