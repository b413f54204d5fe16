"""Metrics that are read on as they are written."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import pytest

from rollyard.inspect import rows
from rollyard.inspect.rows import MetricRows


def test_a_line_with_what_no_count_comes_to_is_none(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "incarnation": 0, "tokens": 7}\n{"step": 2, "incarnation": 0, "tokens": %s}\n' % ("9" * 400))
    assert [row["step"] for row in MetricRows(path).rows()] == [1]


def test_two_that_ask_at_once_have_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second comes while the first reads: it waits, and no line is counted twice."""
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "incarnation": 0}) + "\n" for step in range(6)]
    path.write_text("".join(lines[:4]))
    metrics, both, parse = MetricRows(path), Barrier(2), rows.metrics_line

    def slowly(line: bytes) -> object:
        """Both are in the middle of the file, if they may be."""
        found = parse(line)
        if found is not None and found["step"] == 1:
            with suppress(BrokenBarrierError):  # the other one is kept out
                both.wait(0.2)
        return found

    monkeypatch.setattr(rows, "metrics_line", slowly)
    with ThreadPoolExecutor(2) as threads:
        found = [each.result() for each in [threads.submit(metrics.rows) for _ in range(2)]]
    assert [len(each) for each in found] == [4, 4]
    with path.open("a") as file:
        file.writelines(lines[4:])
    assert [row["step"] for row in metrics.rows()] == [0, 1, 2, 3, 4, 5]
