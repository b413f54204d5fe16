"""What a worker process for users' code is set up with, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from rollyard.settle import Surroundings

ROOT = Path(__file__).resolve().parents[1]
LINK = "/rollyards-own"
SCRIPT = f"""
import json, os, subprocess, sys
from rollyard.settle import Surroundings, heard, settle
sys.path.insert(0, {LINK!r})  # as children are started
settle(Surroundings(sys.argv[1], [{str(ROOT)!r}, "/before", *sys.path[1:]], {{"PYTHONPATH": "/own"}}), "the.option")
print(json.dumps([sys.path[:3], os.environ.get("PYTHONPATH"), os.environ.get("PYTHONSAFEPATH")]))
print("caf\\udce9")
os.write(2, b"early ")
with heard():
    sys.stderr.write("heard\\n")
    os.write(2, b"too\\n")
    subprocess.run([sys.executable, "-c", "import os; os.write(2, b'and its own\\\\n')"], check=True)
os.write(2, b"late")
"""


def test_a_process_that_is_set_up(tmp_path):
    """It finds modules in the order of the run's process, and starts others with the user's own variables."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "prints")]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "early late")
    told, odd, *errors = (tmp_path / "prints").read_text().splitlines()
    assert json.loads(told) == [[LINK, str(ROOT), "/before"], "/own", None]
    assert odd == "caf\\udce9" and errors == ["heard", "too", "and its own"]
    assert (tmp_path / "prints").stat().st_mode & 0o777 == 0o600


def test_what_a_worker_takes_over(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/own")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(sys, "path", ["", "/elsewhere"])
    around = Surroundings.here(Path("/run/it.log"))
    assert around == ("/run/it.log", (os.getcwd(), "/elsewhere"), {"PYTHONPATH": "/own"}, 0)
