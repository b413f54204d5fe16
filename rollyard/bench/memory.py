"""Memory of a process and its children, from /proc. None where there is no /proc."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rollyard.bench.result import Figure

PROC = Path("/proc")
RESET_PEAK = "5"  # see proc(5), clear_refs


def reset_peak(pid: int) -> None:
    """Forget the peak so far, so that loading the model does not count."""
    for process in _tree(pid):
        with suppress(OSError):  # it ended meanwhile
            (PROC / str(process) / "clear_refs").write_text(RESET_PEAK, encoding="ascii")


def memory(pid: int, without: int | None = None) -> tuple[Figure, ...]:
    """Peak of resident memory since `reset_peak`, and what is resident now with shared pages counted once, in MiB.

    Args:
        without: a child that is not counted, nor what is below it: the other side.
    """
    if not PROC.is_dir():
        return ()
    processes = list(_tree(pid, without))
    peak = sum(_kib(PROC / str(process) / "status", "VmHWM:") for process in processes)
    now = sum(_kib(PROC / str(process) / "smaps_rollup", "Pss:") for process in processes)
    return Figure("peak memory", peak / 1024, "MiB"), Figure("memory", now / 1024, "MiB")


def resident(pid: int) -> int:
    """Bytes of this process alone that are in memory now; 0 where there is no /proc."""
    return _kib(PROC / str(pid) / "status", "VmRSS:") * 1024


def _tree(pid: int, without: int | None = None) -> Iterator[int]:
    """The process and all below it."""
    if pid == without or not (PROC / str(pid)).is_dir():
        return
    yield pid
    for task in (PROC / str(pid) / "task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text(encoding="ascii").split():
                yield from _tree(int(child), without)


def _kib(path: Path, key: str) -> int:
    """0 for a process that ended meanwhile."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(key)), 0)
