"""What a worker process for users' code is set up with, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rollyard import settle
from rollyard.settle import Surroundings, shorten

ROOT = Path(__file__).resolve().parents[1]
LINK = "/rollyards-own"
SCRIPT = f"""
import json, os, sys
from rollyard.settle import Surroundings, settle
sys.path.insert(0, {LINK!r})  # as children are started
settle(Surroundings(sys.argv[1], [{str(ROOT)!r}, "/before", *sys.path[1:]], {{"PYTHONPATH": "/own"}}))
print(json.dumps([sys.path[:3], os.environ.get("PYTHONPATH"), os.environ.get("PYTHONSAFEPATH")]))
print("caf\\udce9")
os.write(2, b"said")
"""


def test_a_process_that_is_set_up(tmp_path):
    """It finds modules in the order of the run's process, and starts others with the user's own variables."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "prints")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "said")
    told, odd = (tmp_path / "prints").read_text().splitlines()
    assert json.loads(told) == [[LINK, str(ROOT), "/before"], "/own", None]
    assert odd == "caf\\udce9" and (tmp_path / "prints").stat().st_mode & 0o777 == 0o600


def test_what_a_worker_takes_over(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/own")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
    around = Surroundings.here(Path("/run/it.log"))
    assert around == ("/run/it.log", (os.getcwd(), "/elsewhere"), {"PYTHONPATH": "/own"})


def test_messages_do_not_grow_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(settle, "LOG_BYTES", 8)
    with (tmp_path / "log").open("wb", buffering=0) as log:
        for text, left in ((b"12345678", 8), (b"9", 0), (b"1", 1)):
            log.write(text)
            shorten(log.fileno())
            assert (tmp_path / "log").stat().st_size == left
