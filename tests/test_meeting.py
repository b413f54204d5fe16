"""Where processes meet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

WAITING = """
import sys; sys.path.insert(0, sys.argv[1])
from rollyard.meeting import failure, held_store, start_thread, told
store = held_store("127.0.0.1", 60.0)
for number in range(60):
    start_thread(lambda: failure(lambda: told(store, ["at-nobody"], 60.0)))
"""


def test_a_process_ends_while_many_threads_wait_at_a_meeting() -> None:
    command = [sys.executable, "-c", WAITING, str(Path(__file__).parents[1])]
    ended = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
