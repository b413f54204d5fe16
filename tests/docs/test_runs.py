"""What docs/runs keeps of runs: configs load, metrics are read, and the page says which reports this version cannot read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rollyard.errors import JournalError
from rollyard.layers import resolve
from rollyard.watch.read import read_report
from tests.sources import ROOT

KEPT = ROOT / "docs" / "runs"
PAGE = (KEPT / "README.md").read_text(encoding="utf-8")
RUNS = sorted(path for path in KEPT.iterdir() if path.is_dir())


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_that_is_kept_can_be_made_again(run: Path) -> None:
    config = resolve(file=run / "config.toml", environment={}).config
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert steps == list(range(1, config.run.steps + 1))
    assert re.search(rf"^## .*\b{run.name}\b", PAGE, re.MULTILINE)


def test_the_page_says_which_reports_are_of_an_earlier_version() -> None:
    table = re.findall(r"^\| `([\w-]+)` \| \d{4}-\d\d-\d\d \| (no|yes) \|$", PAGE, re.MULTILINE)
    assert dict(table) == {run.name: "yes" if readable(run / "report.json") else "no" for run in RUNS}


def readable(path: Path) -> bool:
    try:
        read_report(path)
    except JournalError:
        return False
    return True
