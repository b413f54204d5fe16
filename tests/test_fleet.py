"""Engines that come to a running run and go: real ones, each in a process of its own."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollyard
from rollyard.cli import main
from rollyard.config import Config
from rollyard.control import NAME, Order, ask
from rollyard.errors import ConfigError
from tests.small import ENGINE, children, config

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    """Config of a run with engines in processes of their own; `changes` are options."""
    own = {"run.steps": 8, "place.placement": "async", "rollout.max_staleness": 1, "rollout.groups_per_step": 4}
    return lambda **changes: config(tmp_path / "run", **own | changes)


def engine_events(run: rollyard.Run) -> list[tuple[Any, ...]]:
    with sqlite3.connect(run.folder.journal) as journal:
        return journal.execute("SELECT engine, event FROM engine_events ORDER BY rowid").fetchall()


def writers(run: rollyard.Run) -> set[str]:
    report = run.report
    assert report is not None
    return {device.device for device in report.usage.devices if device.busy_ns.get("generate")}


def accounted(run: rollyard.Run) -> None:
    """The run ended as planned, and every prompt was trained, or was live at the end."""
    report = run.report
    assert report is not None and not report.finished.failed
    assert report.prompts.admitted == report.prompts.trained + sum(report.prompts.dropped.values())
    assert set(report.prompts.dropped) <= {"stopped"} and not children(ENGINE)
    assert not (run.folder.path / NAME).exists()


def until(run: rollyard.Run, steps: Any, engine: str, state: str) -> None:
    """Go on until an engine is in this state; None: gone."""
    for _ in steps:
        if dict(ask_states(run)).get(engine, "") == state:
            return
    raise AssertionError(f"{engine} never was {state}")


def ask_states(run: rollyard.Run) -> tuple[tuple[str, str], ...]:
    return run._going.fleet.states()


def test_an_engine_comes_and_another_leaves(make: Callable[..., Config]) -> None:
    run = rollyard.Run(make(**{"run.steps": 1000}))
    steps = iter(run)
    next(steps)
    assert run.add_engine() == "engine-1"
    with pytest.raises(ConfigError, match="engine-1 is starting"):
        run.remove_engine("engine-1")
    with pytest.raises(ConfigError, match="engine-0 is the last engine"):
        run.remove_engine("engine-0")
    until(run, steps, "engine-1", "up")
    for _ in range(3):
        next(steps)
    run.remove_engine("engine-0")
    with pytest.raises(ConfigError, match="engine-0 is leaving"):
        run.remove_engine("engine-0")
    with pytest.raises(ConfigError, match="last engine"):
        run.remove_engine("engine-1")
    until(run, steps, "engine-0", "")
    assert len(children(ENGINE)) == 1
    next(steps)
    run.stop("enough")
    for _ in steps:
        pass
    accounted(run)
    assert writers(run) >= {"engine-0", "engine-1"}
    told = engine_events(run)
    assert told.index(("engine-1", "up")) < told.index(("engine-1", "loaded")) < told.index(("engine-0", "left"))
    assert run.report is not None
    wall = {device.device: device.wall_ns for device in run.report.usage.devices}
    assert max(wall["engine-0"], wall["engine-1"]) < wall["trainer-0"]


def test_an_engine_that_is_cut_gives_up_nothing(make: Callable[..., Config]) -> None:
    changes = {"place.generate": 2, "rollout.max_tokens": 24, "rollout.ignore_eos": True, "place.placement": "separate"}
    run = rollyard.Run(make(**changes, **{"rollout.max_staleness": 0, "run.steps": 6}))
    steps = iter(run)
    next(steps)
    run.remove_engine("engine-1", cut=True)
    for _ in steps:
        pass
    accounted(run)
    report = run.report
    assert report is not None and report.steps == 6 and report.prompts.dropped == {} and report.members.dropped == {}
    assert ("engine-1", "left") in engine_events(run) and ("engine-1", "down") not in engine_events(run)


def test_nobody_comes_or_goes_where_devices_are_shared(tmp_path: Path) -> None:
    run = rollyard.Run(config(tmp_path / "run", **{"run.steps": 2}))
    with pytest.raises(ConfigError, match="not"):
        run.add_engine()
    for _ in run:
        with pytest.raises(ConfigError, match="share the trainers' devices"):
            run.add_engine()
        with pytest.raises(ConfigError, match="no engine engine-7"):
            run.remove_engine("engine-7")
    with pytest.raises(ConfigError, match="going on"):
        run.remove_engine("engine-0")


PROGRAM = """
import sys
from pathlib import Path
import rollyard
from tests.small import config
run = rollyard.Run(config(Path(sys.argv[1]), **{"run.steps": 1000, "place.placement": "async", "rollout.max_staleness": 1}))
for step in run:
    pass
"""


@pytest.mark.slow
def test_the_command_adds_and_removes_engines_of_another_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / ("deep" * 30) / "run"  # a path longer than a socket's may be
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)]) as program:
        try:
            wait_for(lambda: (folder / NAME).exists())
            assert (folder / NAME).stat().st_mode & 0o077 == 0
            assert main(["engines", str(folder)]) == 0 and "engine-0     up" in capsys.readouterr().out
            assert main(["engines", str(folder), "remove", "engine-0"]) == 2
            assert "engine-0 is the last engine" in capsys.readouterr().err
            assert main(["engines", str(folder), "add", "--url", "http://127.0.0.1:1"]) == 2
            assert "started by it" in capsys.readouterr().err
            assert main(["engines", str(folder), "add"]) == 0 and "engine-1 is being started" in capsys.readouterr().out
            wait_for(lambda: dict(ask(folder, Order("list")).engines).get("engine-1") == "up")
            assert main(["engines", str(folder), "remove", "engine-0", "--cut"]) == 0
            wait_for(lambda: "engine-0" not in dict(ask(folder, Order("list")).engines))
        finally:
            os.kill(program.pid, signal.SIGKILL)
    assert main(["engines", str(folder)]) == 2 and "no run is going on there" in capsys.readouterr().err
    assert main(["engines", str(tmp_path / "nothing")]) == 2 and "no run" in capsys.readouterr().err


def wait_for(happened: Callable[[], bool], seconds: float = 90.0) -> None:
    import time

    until_ = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until_
        time.sleep(0.1)
