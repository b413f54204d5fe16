"""Whole runs with real engines, one of which stands still."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from pathlib import Path

import pytest

import rollyard
from tests.small import ENGINE, children, config


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_an_engine_that_stands_still_is_replaced_and_the_run_goes_on(tmp_path: Path) -> None:
    """It is stopped while it writes, or is told to take new weights."""
    changes: dict[str, object] = {
        "place.placement": "async",
        "place.generate": 2,
        "rollout.max_staleness": 1,
        "run.steps": 10_000,
        "weights.limit_s": 3,
        "engine.silent_s": 1,
        "prompts.held_out": 0,
    }
    run = rollyard.Run(config(tmp_path / "run", **changes))
    stopped, began, slowest, last = 0, 0.0, 0.0, 0
    for step in run:
        now = time.monotonic()
        slowest = max(slowest, now - began if began else 0.0)
        began = now
        if step.step == 2:
            stopped = children(ENGINE)[0]
            os.kill(stopped, signal.SIGSTOP)
        elif stopped and not last and stopped not in children(ENGINE) and len(children(ENGINE)) == 2:
            last = step.step + 3 if dict(run._going.fleet.states()) == {"engine-0": "up", "engine-1": "up"} else 0
        if step.step == last:
            run.stop("it is back")
    report = run.report
    assert report is not None and not report.finished.failed and report.steps >= last > 0
    assert set(report.prompts.dropped) <= {"stopped"} and not children(ENGINE)
    assert slowest < 10  # of all steps, the one that waited for it among them
    with sqlite3.connect(run.folder.journal) as journal:
        told = journal.execute("SELECT engine, event, text FROM engine_events ORDER BY rowid").fetchall()
    (down,) = [number for number, (_, event, _) in enumerate(told) if event == "down"]
    assert told[down][0] == "engine-0" and " s" in told[down][2]
    after = [(engine, event) for engine, event, _ in told[down:]]
    assert after.index(("engine-0", "up")) < after.index(("engine-0", "loaded"))
