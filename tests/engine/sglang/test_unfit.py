"""Whole runs on two servers, one of which is not fit: it is let go of, tried again, and the run goes on."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import rollyard
from tests.engine.sglang.test_run import config
from tests.engine.sglang_double import Double, double
from tests.engine.sglang_parts import Fault
from tests.rewards import share_of_answer
from tests.tiny import tiny_folder

Harm = Callable[[Double], Awaitable[None]]


async def is_started_anew(server: Double) -> None:
    """And serves at the same address as if nothing had been; what it was writing breaks off, else nobody would notice."""
    while server._idle.is_set():  # noqa: ASYNC110 (it is a server, which tells nobody)
        await asyncio.sleep(0.001)
    await server.restart()


async def forgets_its_weights(server: Double) -> None:
    """And still says that it has them."""
    server._open.clear()
    await server._idle.wait()
    await server._switch(str(server.folder))
    server._open.set()


async def is_mute_for_a_while(server: Double) -> None:
    server.faults["/generate"] = Fault(hang=True)
    await asyncio.sleep(2.5)
    server.faults.clear()


HARMS: list[tuple[Harm, str]] = [
    (is_started_anew, ""),  # how a connection breaks has many names
    (forgets_its_weights, "says that it has version 2, and decodes with other weights, those of version 0"),
    (is_mute_for_a_while, "it wrote nothing for"),
]


@pytest.mark.parametrize(("harm", "told"), HARMS, ids=[harm.__name__ for harm, _ in HARMS])
async def test_it_is_tried_again_and_gets_the_newest_weights(tmp_path: Path, harm: Harm, told: str) -> None:
    folder = tiny_folder(tmp_path / "model")
    async with double(folder) as one, double(folder) as two:
        urls = f"{one.url},{two.url}"
        changes = {"engine.url": urls, "place.generate": 2, "run.steps": 1000, "weights.canary": False, "engine.silent_s": 1}
        changes |= {"place.restarts": 3}
        run = rollyard.Run(config(tmp_path, folder, **changes), reward=share_of_answer)

        async def harmed() -> None:
            while two.label != "2.0":  # noqa: ASYNC110 (it is a server, which tells nobody)
                await asyncio.sleep(0.001)
            await harm(two)

        harming, last = asyncio.create_task(harmed()), 0
        async for step in run:
            told_of = events(run)
            back = [event for engine, event, _ in told_of if engine == "engine-1"][-2:] == ["loaded", "loaded"]
            down = any(event == "down" for _, event, _ in told_of)
            last = last or (step.step + 2 if down and back and harming.done() else 0)
            if step.step == last:
                run.stop("it is back")
        await harming
        assert run.report is not None and 0 < last <= run.report.steps <= float(two.label) + 1  # the last version goes nowhere
    report, found = run.report, events(run)
    assert report is not None and not report.finished.failed and report.steps >= last
    down = [(engine, text) for engine, event, text in found if event == "down"]
    assert {engine for engine, _ in down} == {"engine-1"} and told in down[0][1]
    assert set(report.prompts.dropped) <= {"stopped", "distrusted"}
    assert bool(report.weights.probes.get("contradicted")) is (harm is forgets_its_weights)


def events(run: rollyard.Run) -> list[tuple[str, str, str]]:
    with sqlite3.connect(run.folder.journal) as journal:
        return journal.execute("SELECT engine, event, text FROM engine_events ORDER BY rowid").fetchall()
