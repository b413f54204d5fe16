from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollyard.bench.memory import memory, reset_peak

pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
MIB = 1 << 20


def peak(pid: int) -> float:
    return next(figure.value for figure in memory(pid) if figure.name == "peak memory")


def test_the_peak_is_counted_from_the_reset_on():
    pid = os.getpid()
    reset_peak(pid)
    before = peak(pid)
    block = bytearray(os.urandom(1)) * (128 * MIB)
    held = memory(pid)
    del block
    assert peak(pid) - before >= 120  # what was given back still counts
    assert held[1].value >= 120
    reset_peak(pid)
    assert peak(pid) - before < 60


def test_children_count_too():
    code = "import sys; block = b'x' * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"ready\n"
        child = int(Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text())
        alone = memory(parent.pid, without=child)[0].value
        assert peak(parent.pid) == pytest.approx(alone + peak(child), abs=1)
        assert alone < 64 <= peak(child)
        parent.communicate()
