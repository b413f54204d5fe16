"""A run that goes on: what it says of itself reaches the page, and costs it little."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.sse import ServerSentEvent

from rollyard.control import LOOK, Order, asked
from rollyard.dashboard import events as events_module
from rollyard.dashboard import feed
from rollyard.dashboard.events import events
from rollyard.dashboard.shown import Shown
from rollyard.errors import ConfigError
from rollyard.journal.folder import RunFolder
from rollyard.loop import Run
from rollyard.types import Activity
from rollyard.watch import recorder
from rollyard.watch.heard import Lanes
from rollyard.watch.live import LOOKED, Look
from rollyard.watch.step import Step
from tests.dashboard.runs import answers, asking, contents, run_of

STEPS = 8


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "EVERY_S", 0.02)
    monkeypatch.setattr(feed, "FRESH_S", 0.01)
    monkeypatch.setattr(feed, "AGAIN_S", 0.01)


@asynccontextmanager
async def going(scratch: Path, until: int = 3, **more: Any) -> AsyncIterator[tuple[Run, AsyncIterator[Step]]]:
    """A run that has done some steps. It goes on while somebody asks; the block may finish it."""
    run = run_of(scratch, STEPS, step_s=0.02, **more)
    steps = run.steps()
    for _ in range(until):
        await anext(steps)
    try:
        yield run, steps
    finally:
        run.stop("the test is over")
        async for _ in steps:
            pass


def looked(folder: RunFolder, known: str = "") -> Look:
    return asked(folder.path, Order(LOOK, known=known), LOOKED)


async def test_figures_are_those_of_the_run_at_that_moment(tmp_path: Path) -> None:
    async with going(tmp_path) as (run, steps), asking(run.folder) as client:
        told = await answers(client, "overview")
        assert (told["state"], told["steps"], told["planned"], told["cause"]) == ("running", 3, STEPS, "")
        assert told["admitted"] == told["trained"] + sum(told["dropped"].values()) + told["live"] > 0
        assert sum(told["phases"].values()) == pytest.approx(told["wall_s"]) and told["phases"]["train"] > 0
        assert sum(told["staleness"].values()) > 0 and told["members"]["admitted"] == 4 * told["admitted"]
        metrics = (await client.get("/metrics")).text
        assert 'rollyard_run_state{run="run",state="running"} 1.0' in metrics and "rollyard_engine_requests" in metrics
        assert (await answers(client, "steps"))["rows"][-1][0] == 3
        async for _ in steps:
            pass
        done = await answers(client, "overview")
    report = json.loads(run.folder.report.read_text())
    assert (done["state"], done["wall_s"], done["tokens"]) == ("finished", report["wall_s"], report["generation_tokens"])


async def test_the_timeline_grows_and_becomes_that_of_the_trace(tmp_path: Path) -> None:
    async with going(tmp_path) as (run, steps):
        shown = Shown(run.folder)
        async with asking(shown) as client:
            first = await answers(client, "timeline")
            await anext(steps)
            await asyncio.sleep(0.3)
            second = await answers(client, "timeline")
            async for _ in steps:
                pass
            whole = await answers(client, "timeline")
    assert first["why"] == "" and {lane["name"] for lane in first["lanes"]} >= {"driver"}
    assert second["whole_ns"] > first["whole_ns"] and len(second["marks"]) > len(first["marks"]) >= 3
    assert [step for step, _ in whole["marks"]] == list(range(1, STEPS + 1))
    for lane in second["lanes"]:
        assert all(Activity(kind) and 0 <= begin < end for begin, end, kind, _ in lane["spans"])
    trained = [sum(end - begin for begin, end, kind, _ in lane["spans"] if kind == "train") for lane in second["lanes"]]
    assert max(trained) > 0


async def _told(stream: AsyncIterator[ServerSentEvent], name: str) -> dict[str, Any]:
    """The next of this name."""
    while True:
        event = await asyncio.wait_for(anext(stream), 20)
        if event.event == name:
            assert event.raw_data is not None
            return dict(json.loads(event.raw_data))


async def test_a_page_is_told_of_each_step_and_of_the_end(tmp_path: Path) -> None:
    async with going(tmp_path, until=2) as (run, steps):
        stream = events(Shown(run.folder), 1, asyncio.Event())
        assert (await _told(stream, "step"))["step"] == 2, "the one that it did not know"
        live = await _told(stream, "live")
        assert (live["step"], live["planned"], live["engines"][0]["slots"]) == (2, STEPS, 8)
        assert live["states"] == {"engine-0": "up", "engine-1": "up"}
        assert {"queue", "live", "eta_s", "activity", "judged", "wanted", "tokens_per_s"} <= set(live)
        await anext(steps)
        row = await _told(stream, "step")
        lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
        assert row == lines[2]
        async for _ in steps:
            pass
        assert await _told(stream, "end") == {"state": "finished", "cause": "all steps are done"}
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_a_page_that_comes_late_is_told_of_new_steps_alone(tmp_path: Path) -> None:
    async with going(tmp_path) as (run, steps):
        stream = events(Shown(run.folder), None, asyncio.Event())
        assert (await anext(stream)).event == "live"
        await anext(steps)
        assert (await _told(stream, "step"))["step"] == 4


async def test_a_second_life_is_told_and_its_steps_are_too(tmp_path: Path) -> None:
    """The file of metrics is another one then, cut to where the life begins."""
    async with going(tmp_path, until=4) as (run, _):
        stream = events(Shown(run.folder), None, asyncio.Event())
        await _told(stream, "live")
        lines = run.folder.metrics.read_text().splitlines(keepends=True)
        other = tmp_path / "other"
        other.write_text("".join(lines[:2]))
        other.replace(run.folder.metrics)
        assert (await _told(stream, "again")) == {}
        with run.folder.metrics.open("a") as file:
            file.write(lines[2])
        assert (await _told(stream, "step"))["step"] == 3


async def test_an_answer_tells_what_is_new_and_nothing_twice(tmp_path: Path) -> None:
    async with going(tmp_path) as (run, steps):
        lanes, sizes = Lanes(), list[int]()
        for _ in range(3):
            look = await asyncio.to_thread(looked, run.folder, feed.ASKED.dump_json(lanes.known()).decode())
            sizes.append(sum(len(lane.intervals) for lane in look.news.lanes))
            lanes.take(look.news)
        assert sizes[0] > 10 > max(sizes[1:]) and not look.news.more
        await anext(steps)
        look = await asyncio.to_thread(looked, run.folder, feed.ASKED.dump_json(lanes.known()).decode())
        assert [step for step, _ in look.news.marks] == [4]


async def test_steps_of_a_long_run_are_told_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer has a most: one that is longer would be cut, and be no answer."""
    async with going(tmp_path, until=5) as (run, _):
        monkeypatch.setattr(recorder, "NEWS", 2)
        lanes, told, more = Lanes(), list[int](), True
        while more:
            look = await asyncio.to_thread(looked, run.folder, feed.ASKED.dump_json(lanes.known()).decode())
            lanes.take(look.news)
            told, more = [*told, len(look.news.marks)], look.news.more
        assert [mark.step for mark in lanes.traced().marks] == [1, 2, 3, 4, 5] and max(told) == 2


async def test_an_order_that_makes_no_sense_ends_nothing(tmp_path: Path) -> None:
    async with going(tmp_path) as (run, _):
        for known in ("{", "[]", '{"places": 3}', '{"places": [[9, 99999]], "marks": 99}', '{"marks": "all"}'):
            with suppress(ConfigError):
                await asyncio.to_thread(looked, run.folder, known)
        assert (await asyncio.to_thread(looked, run.folder)).live.step == 3


async def written(client: httpx.AsyncClient) -> None:
    """The journal has the run's first groups: it is written about once a second."""
    for _ in range(200):
        if (await answers(client, "rollouts"))["total"]:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("nothing is written")


async def test_who_does_not_answer_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's loop stands still: what its files say is shown."""
    async with going(tmp_path) as (run, _), asking(run.folder) as client:
        await written(client)
        monkeypatch.setattr(feed, "LIMIT_S", 0.05)
        told = Shown(run.folder).overview()  # in this thread, so the loop stands still
        assert (told.state, told.steps) == ("running", 3) and told.admitted > 0 and told.slots_busy is None


async def test_looking_at_a_run_changes_nothing_in_its_folder(tmp_path: Path) -> None:
    async with going(tmp_path) as (run, steps):
        async with asking(run.folder) as client:
            names = set(contents(run.folder.path))
            await written(client)
            for path in ("overview", "groups", "rollouts/0/0", "timeline", "histograms"):
                await answers(client, path)
            assert set(contents(run.folder.path)) == names
        async for _ in steps:
            pass
    assert not [path for path in run.folder.path.iterdir() if path.name.endswith(("-wal", "-shm", ".sock"))]
