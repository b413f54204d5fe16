"""Runs of the tiny preset, and their dashboards, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.sources import ROOT

LIMIT_S = 30


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "rollyard", *map(str, words)]


def run(out: Path, *options: object) -> Path:
    """A whole run; returns its folder."""
    words = command("run", "--preset", "tiny", "--out", out, "--view", "plain", *options)
    subprocess.run(words, env=environment(), check=True, capture_output=True, timeout=LIMIT_S * 2)
    return out


@contextmanager
def dashboard(folder: Path, port: int = 0) -> Iterator[str]:
    """Its address, while `rollyard inspect RUN --web` serves it. Ctrl-C ends that without a complaint."""
    words = command("inspect", folder, "--web", "--json", "--port", port)
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line, server.communicate(timeout=LIMIT_S)[1]
            yield str(json.loads(line)["address"])
        finally:
            server.send_signal(signal.SIGINT)
            try:
                _, said = server.communicate(timeout=LIMIT_S)
            finally:
                server.kill()
    assert (server.returncode, said) == (0, ""), f"{server.returncode}: {said}"
