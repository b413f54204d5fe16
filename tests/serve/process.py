"""`rollyard serve` as a process of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.sources import ROOT

TOKEN = "of-this-test"


def started(*options: str) -> subprocess.Popen[str]:
    """It does not serve yet."""
    command = [sys.executable, "-m", "rollyard", "serve", *options]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ROLLYARD_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class Process:
    """`rollyard serve` with these options."""

    def __init__(self, *options: str) -> None:
        self.process = started(*options)
        assert self.process.stdout is not None
        self.said: list[str] = []
        for line in self.process.stdout:
            self.said.append(line)
            if found := re.search(r"serving (http://\S+) with a token", line):
                self.url = found[1]
                break
        else:
            raise AssertionError("".join(self.said))
        self._rest = threading.Thread(target=lambda: self.said.extend(self.process.stdout or ()))
        self._rest.start()

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._rest.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextmanager
def serving(*options: str) -> Iterator[Process]:
    process = Process(*options)
    try:
        yield process
    finally:
        if process.process.poll() is None:
            process.end(signal.SIGKILL)
