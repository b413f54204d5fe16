"""Bad weather for whole runs: a process is killed, and the run goes on or says why it cannot; nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollyard
from rollyard.config import Config
from rollyard.place.ray import Actor, Cluster
from tests.small import ENGINE, HOST, children, config

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    """Config of a run that is long enough to be disturbed; `changes` are options."""
    return lambda **changes: config(tmp_path / "run", **{"run.steps": 30, **changes})


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Process ids of what a Ray cluster was asked to host, by name."""
    found: dict[str, int] = {}

    async def launch(self: Cluster, *args: Any, start: Any = Cluster.launch, **named: Any) -> Actor:
        actor: Actor = await start(self, *args, **named)
        found[named["name"]] = actor.pid
        return actor

    monkeypatch.setattr(Cluster, "launch", launch)
    return found


def broken(run: rollyard.Run, victim: Callable[[], int]) -> tuple[Exception, float]:
    """Kill a process after the second step: what the run ends with, and in how many seconds."""
    killed = 0.0
    with pytest.raises(Exception) as told:
        for step in run:
            if step.step == 2:
                os.kill(victim(), signal.SIGKILL)
                killed = time.monotonic()
    seconds = time.monotonic() - killed
    assert run.report is not None and run.report.finished.failed and run.report.steps < 30
    prompts, members = run.report.prompts, run.report.members
    for counts in (prompts, members):
        assert counts.admitted == counts.trained + sum(counts.dropped.values())
    assert not children(HOST) and not children(ENGINE)
    return told.value, seconds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:version .* is not saved")  # what only the dead one had is lost
@pytest.mark.parametrize("rank", [0, 1])
def test_a_trainer_that_is_killed_ends_the_run(make: Callable[..., Config], rank: int) -> None:
    told, seconds = broken(rollyard.Run(make(place__placement="separate", place__train=2)), lambda: children(HOST)[rank])
    assert f"trainer-{rank}" in str(told) and "signal 9" in str(told)
    assert seconds < 30


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:version .* is not saved")
def test_a_half_that_is_killed_ends_the_run(make: Callable[..., Config]) -> None:
    told, seconds = broken(rollyard.Run(make(place__placement="swap", rollout__max_staleness=1)), lambda: children(HOST)[0])
    assert "half" in str(told) and "signal 9" in str(told)
    assert seconds < 30


@pytest.mark.slow
def test_a_run_that_nobody_goes_on_with_leaves_nothing(make: Callable[..., Config]) -> None:
    async def begin() -> None:
        steps = rollyard.Run(make(place__placement="async", rollout__max_staleness=1, place__generate=2)).steps()
        await anext(steps)
        assert len(children(ENGINE)) == 2
        await steps.aclose()

    asyncio.run(begin())
    assert not children(ENGINE)


@pytest.mark.slow
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
    assert not children(HOST) and not children(ENGINE)


@pytest.mark.ray
def test_an_engine_in_an_actor_that_is_killed_is_started_again(make: Callable[..., Config], actors: dict[str, int]) -> None:
    changes = {"place.placement": "async", "place.runtime": "ray", "rollout.max_staleness": 1, "run.steps": 8}
    run, first = rollyard.Run(make(**changes)), 0
    for step in run:
        if step.step == 2:
            first = actors["engine engine-0"]
            os.kill(first, signal.SIGKILL)
    report = run.report
    assert report is not None and not report.finished.failed and report.steps == 8
    assert (report.prompts.trained, dict(report.prompts.dropped)) == (report.prompts.admitted, {})
    assert actors["engine engine-0"] != first
    assert not any(Path(f"/proc/{pid}").exists() for pid in actors.values())


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore:version .* is not saved")
def test_a_trainer_in_an_actor_that_is_killed_ends_the_run(make: Callable[..., Config], actors: dict[str, int]) -> None:
    run = rollyard.Run(make(place__placement="async", place__runtime="ray", rollout__max_staleness=1))
    told, seconds = broken(run, lambda: actors["trainer-0"])
    assert "trainer-0" in str(told) and seconds < 30
    assert not any(Path(f"/proc/{pid}").exists() for pid in actors.values())
