"""Engines that come to a running run and go: real ones, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

import rollyard
from rollyard.bench import virtual
from rollyard.bench.doubles import DoubleEngine, Meter, stations
from rollyard.bench.placements import config_of
from rollyard.bench.theory import Work
from rollyard.cli import main
from rollyard.config import Config
from rollyard.control import NAME, Order, ask
from rollyard.errors import ConfigError
from rollyard.events import EngineDown, Rollover
from rollyard.ring import Ring
from rollyard.stations import Stations
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


@pytest.mark.slow
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


@pytest.mark.slow
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
            wait_for(lambda: main(["engines", str(folder)]) == 0)  # it has stations
            capsys.readouterr()
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
    until_ = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until_
        time.sleep(0.1)


# --------------------------------------------------------- the same shell with engines that take no time of this machine


def doubled(placement: str, work: Work, meter: Meter) -> Stations:
    """Stations on a virtual clock, to which engines may be added."""
    made = stations(placement, work, meter)

    async def launch(name: str, url: str) -> DoubleEngine:
        await asyncio.sleep(10 * work.token_s)
        engine = DoubleEngine(name, work.slots, work, meter, work.transfer_s)
        meter.engines = (*meter.engines, engine)
        return engine

    return replace(made, launch=launch)


async def disturbed(placement: str, seed: int, scratch: Path) -> rollyard.Run:
    """A run to which engines come, and which they leave, at random moments."""
    work, meter, dice = Work(3.0, steps=12, groups=4, size=4, generate=2, slots=4), Meter(), random.Random(seed)
    run = rollyard.Run(config_of(placement, Rollover.KEEP, work, scratch), stations=lambda past: doubled(placement, work, meter))
    refused = list[str]()

    async def disturb() -> None:
        while True:
            await asyncio.sleep(dice.uniform(0, 0.2))
            try:
                if dice.random() < 0.5:
                    run.add_engine()
                else:
                    run.remove_engine(dice.choice([name for name, _ in run._going.fleet.states()]), dice.random() < 0.5)
            except ConfigError as error:
                refused.append(error.problem)

    disturbing = asyncio.create_task(disturb())
    trained = [group.id async for step in run for group in step.groups]
    disturbing.cancel()
    assert len(trained) == len(set(trained)) == work.steps * work.groups
    told = engine_events(run)
    for engine in meter.engines:
        events = [event for name, event in told if name == engine.id]
        assert "down" not in events and ("left" not in events or events[-1] == "left")
        assert events[1:2] in ([], ["loaded"], ["left"])
    assert sum("left" in event for _, event in told) > 0 and len(meter.engines) > 2
    assert all("last engine" in problem or " is " in problem for problem in refused)
    return run


@pytest.mark.parametrize("placement", ["separate", "async"])
@pytest.mark.parametrize("seed", range(4))
def test_engines_come_and_go_at_any_moment(placement: str, seed: int, tmp_path: Path) -> None:
    run = virtual.run(disturbed(placement, seed, tmp_path))
    report = run.report
    assert report is not None and not report.finished.failed and report.steps == 12
    assert set(report.prompts.dropped) <= {"stopped"}
    tokens = report.tokens
    assert tokens.generated == tokens.trained + sum(tokens.dropped.values()) + tokens.live


async def lossy(seed: int, scratch: Path) -> rollyard.Run:
    """Engines come, go and are lost, also while they leave or start again, and each may be started again once."""
    work, meter, dice = Work(3.0, steps=16, groups=4, size=4, generate=3, slots=4), Meter(), random.Random(seed)
    asked = config_of("async", Rollover.KEEP, work, scratch)
    asked = asked.model_copy(update={"place": asked.place.model_copy(update={"restarts": seed % 2})})
    given_back, rings = list[str](), list[Ring]()

    async def release(name: str) -> None:
        given_back.append(name)

    made = replace(doubled("async", work, meter), release=release)
    run = rollyard.Run(asked, stations=lambda past: made)

    async def disturb() -> None:
        while True:
            await asyncio.sleep(dice.uniform(0, 0.2))
            staying = sorted(run._going.fleet._conductor.staying)
            name = dice.choice(staying or ["nobody"])
            with suppress(ConfigError):
                if len(staying) < 3:
                    run.add_engine()
                    continue
                if dice.random() < 0.5:
                    run.remove_engine(name, dice.random() < 0.5)
                if dice.random() < 0.7:
                    cast(DoubleEngine, made.engines[name]).die("killed")

    disturbing = asyncio.create_task(disturb())
    try:
        async for step in run:
            rings += [run._going] * (step.step == 1)
    finally:
        disturbing.cancel()
    report, told = run.report, engine_events(run)
    assert report is not None and not report.finished.failed and report.steps == 16
    ends = [name for name, event in told if event in ("left", "lost")]
    assert len(ends) == len(set(ends)) and any(event == "lost" for _, event in told)
    here = {name for name, event in told if event == "up"}  # others were given up as the run ended
    released = [name for name in given_back if name in here]
    assert len(released) == len(set(released)) and set(ends) >= set(released)
    assert len(ends) - len(released) <= 1 and not set(made.engines) & set(released)  # the last one as the run ended
    counted = [*rings[0]._past, *(engine.stats() for engine in made.engines.values())]
    assert sorted(map(repr, counted)) == sorted(repr(engine.stats()) for engine in meter.engines if engine.id in here)
    return run


@pytest.mark.parametrize("seed", range(6))
def test_engines_that_are_lost_for_good_are_let_go_of(seed: int, tmp_path: Path) -> None:
    virtual.run(lossy(seed, tmp_path))


At = Callable[[int, rollyard.Run, Stations], None]


def steered(scratch: Path, restarts: int, at: At, **engine: Any) -> rollyard.Run:
    """A run of two engines, `engine` is of its config; `at` is called after every step."""

    async def going() -> rollyard.Run:
        work, meter = Work(3.0, steps=30, groups=4, size=4, generate=2, slots=4), Meter()
        asked, made = config_of("async", Rollover.KEEP, work, scratch), doubled("async", work, meter)
        place = asked.place.model_copy(update={"restarts": restarts})
        asked = asked.model_copy(update={"place": place, "engine": asked.engine.model_copy(update=engine)})
        run = rollyard.Run(asked, stations=lambda past: made)
        async for step in run:
            at(step.step, run, made)
        await asyncio.sleep(1)
        return run

    return virtual.run(going())


@pytest.mark.parametrize("lost", [False, True])
def test_a_server_that_left_or_was_lost_may_come_back(lost: bool, tmp_path: Path) -> None:
    def at(step: int, run: rollyard.Run, made: Stations) -> None:
        if step == 1:
            for url in ("http://one:1/", "http://two:2"):
                with pytest.raises(ConfigError, match="is an engine of this run already"):
                    run.add_engine(url)
            if lost:
                cast(DoubleEngine, made.engines["engine-0"]).die("killed")
            else:
                run.remove_engine("engine-0")
        if step == 10:
            assert "engine-0" not in dict(ask_states(run)) and run.add_engine("http://one:1/") == "engine-2"
        if step == 20:
            assert dict(ask_states(run)) == {"engine-1": "up", "engine-2": "up"}

    run = steered(tmp_path, 0, at, kind="sglang", url=("http://one:1", "http://two:2/"))
    assert ("engine-0", "lost" if lost else "left") in engine_events(run)


def test_an_engine_that_is_lost_before_its_turn_to_leave_is_not_started_again(tmp_path: Path) -> None:
    def at(step: int, run: rollyard.Run, made: Stations) -> None:
        if step == 1:
            run.remove_engine("engine-0")
            run._inbox.put_nowait(EngineDown("engine-0", "killed"))  # heard of before the order has its turn

    run = steered(tmp_path, 1, at)
    own = [event for name, event in engine_events(run) if name == "engine-0"]
    assert own.count("up") == 1 and set(own) & {"lost", "left"}


def test_an_engine_stays_when_the_other_is_lost_before_its_turn_to_leave(tmp_path: Path) -> None:
    def at(step: int, run: rollyard.Run, made: Stations) -> None:
        if step == 1:
            run.remove_engine("engine-0")
            run._inbox.put_nowait(EngineDown("engine-1", "killed"))

    with pytest.warns(RuntimeWarning, match="engine-0 stays: the others were lost meanwhile"):
        run = steered(tmp_path, 0, at)
    assert ("engine-1", "lost") in engine_events(run) and ("engine-0", "left") not in engine_events(run)


def test_an_engine_that_is_ordered_as_the_run_ends_is_not_started(tmp_path: Path) -> None:
    launched = list[str]()

    def at(step: int, run: rollyard.Run, made: Stations) -> None:
        if step == 30:
            ring, launch = run._going, made.launch
            assert launch is not None

            async def watched(name: str, url: str) -> Any:
                launched.append(name)
                return await launch(name, url)

            ring._stations = ring.fleet._stations = replace(made, launch=watched)
            close = ring.close

            async def closed() -> Any:
                try:
                    return await close()
                finally:
                    ring.fleet.add()  # another thread had got hold of it before

            ring.close = closed  # type: ignore[method-assign]

    steered(tmp_path, 0, at)
    assert not launched


@pytest.mark.slow
def test_more_engines_write_more(tmp_path: Path) -> None:
    """Four times the engines from the second step on: the same work in a third of the time or less, theirs counted from then."""

    async def timed(more: int, scratch: Path) -> tuple[float, rollyard.Run]:
        work, meter = Work(8.0, steps=30, groups=16, size=8, generate=1, slots=8, staleness=3), Meter()
        run = rollyard.Run(config_of("async", Rollover.KEEP, work, scratch), stations=lambda past: doubled("async", work, meter))
        async for step in run:
            for _ in range(more if step.step == 1 else 0):
                run.add_engine()
        return asyncio.get_running_loop().time(), run

    for name in ("alone", "together"):
        (tmp_path / name).mkdir()
    alone, _ = virtual.run(timed(0, tmp_path / "alone"))
    together, run = virtual.run(timed(3, tmp_path / "together"))
    assert together < alone / 3
    assert run.report is not None
    wall = {device.device: device.wall_ns / 1e9 for device in run.report.usage.devices}
    assert sorted(wall) == ["engine-1", "engine-2", "engine-3"]  # doubles that are there at the start have no account
    assert all(0.5 * together < seconds < together - 0.3 for seconds in wall.values())
