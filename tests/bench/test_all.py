"""`make bench-all` in a tree whose programs are stand-ins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
READY = (
    *(".venv/.installed", "models/smollm2-135m/config.json"),
    *(f"benchmarks/.venvs/{name}" for name in ("vllm/.installed", "vllm/.ready", "trl/.installed", "areal/.installed")),
)
PROGRAMS = {
    "rollyard": 'case "$*" in *$FAILING*) exit 1;; esac; echo "{}"',
    "python": "echo rendered $(wc -l < results.jsonl)",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "benchmarks").mkdir()
    for name in ("pyproject.toml", "constraints.txt", "Makefile", "benchmarks/all.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name, body in PROGRAMS.items():
        program = tmp_path / ".venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    for name in READY:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(("failing", "code"), [("no-such-workload", 0), ("ragged", 2)])
def test_the_page_is_written_whatever_failed(tree, failing, code):
    environment = {"PATH": "/usr/bin:/bin", "FAILING": failing}
    command = ["make", "bench-all", "RESULTS=results.jsonl"]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=50)
    begun = [line for line in done.stderr.splitlines() if line.startswith("== rollyard")]
    left = [line for line in begun if failing not in line]
    assert (done.returncode, bool(code)) == (code, len(left) < len(begun)), done.stderr
    assert f"rendered {len(left)}" in done.stdout and len(left) > 20
