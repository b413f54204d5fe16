"""Bad weather for whole runs: a process is killed, and the run goes on or says why it cannot; nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import rollyard
from rollyard.config import Config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
SMALL = {"steps": 3, "batch": 8, "width": 32, "feed_forward": 64, "heads": 2, "layers": 1}
HOST, ENGINE = "rollyard.worker:serve_host", "rollyard.worker:serve_engine"


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    """Config of a small run; `changes` are dotted options."""

    def make_(**changes: object) -> Config:
        values = {
            "run.out": str(tmp_path / "run"),
            "run.steps": 30,
            "rollout.group_size": 2,
            "rollout.groups_per_step": 4,
            "engine.slots": 16,
            "engine.kernels": "plain",
            "weights.limit_s": 60,
        }
        small = {f"warmup.{name}": value for name, value in SMALL.items()}
        given = values | small | {name.replace("__", "."): value for name, value in changes.items()}
        return rollyard.resolve(preset="sort", environment={}, overrides=given).config

    return make_


def hosts(target: str) -> list[int]:
    """Children of this process that run `target`, the oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and target.encode() in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)


def broken(run: rollyard.Run, target: str, which: int = 0) -> tuple[Exception, float]:
    """Kill a host after the second step: what the run ends with, and in how many seconds."""
    killed = 0.0
    with pytest.raises(Exception) as told:
        for step in run:
            if step.step == 2:
                os.kill(hosts(target)[which], signal.SIGKILL)
                killed = time.monotonic()
    seconds = time.monotonic() - killed
    assert run.report is not None and run.report.finished.failed and run.report.steps < 30
    prompts, members = run.report.prompts, run.report.members
    for counts in (prompts, members):
        assert counts.admitted == counts.trained + sum(counts.dropped.values())
    assert not hosts(HOST) and not hosts(ENGINE)
    return told.value, seconds


@pytest.mark.filterwarnings("ignore:version .* is not saved")  # what only the dead one had is lost
@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_that_is_killed_ends_the_run(make: Callable[..., Config], rank: int) -> None:
    told, seconds = broken(rollyard.Run(make(place__placement="separate", place__train=2)), HOST, rank)
    assert f"trainer-{rank}" in str(told) and "signal 9" in str(told)
    assert seconds < 30


@pytest.mark.filterwarnings("ignore:version .* is not saved")
def test_a_half_that_is_killed_ends_the_run(make: Callable[..., Config]) -> None:
    told, seconds = broken(rollyard.Run(make(place__placement="swap", rollout__max_staleness=1)), HOST)
    assert "half" in str(told) and "signal 9" in str(told)
    assert seconds < 30


def test_a_run_that_nobody_goes_on_with_leaves_nothing(make: Callable[..., Config]) -> None:
    async def begin() -> None:
        steps = rollyard.Run(make(place__placement="async", rollout__max_staleness=1, place__generate=2)).steps()
        await anext(steps)
        assert len(hosts(ENGINE)) == 2
        await steps.aclose()

    asyncio.run(begin())
    assert not hosts(ENGINE)


def test_two_runs_at_once(make: Callable[..., Config], tmp_path: Path) -> None:
    """With transports that have ports and memory of their own."""

    async def one(name: str, transport: str) -> None:
        changes = {"place.placement": "async", "rollout.max_staleness": 1, "run.steps": 4, "weights.transport": transport}
        run = rollyard.Run(make(**changes, place__train=2, run__out=str(tmp_path / name)))
        async for _ in run:
            pass
        assert run.report is not None and not run.report.finished.failed

    async def both() -> None:
        await asyncio.gather(one("first", "broadcast"), one("second", "shared_memory"))

    asyncio.run(both())
    assert not hosts(HOST) and not hosts(ENGINE)
