"""Runs that fail while they train: what they save has a batch that the books have as trained."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.chaos.faults import Fault
from rollyard.ring import Ring
from rollyard.watch.step import Step
from tests.chaos.doubles import Times
from tests.chaos.lives import Life, uninterrupted
from tests.chaos.world import Shape, World

SHAPE = Shape("async", overtaking="never", engines=1, restarts=0, steps=6, save=2, times=Times(train=4.0))
SAVED = 4  # steps: the last one was being trained


def test_its_last_engine_is_lost(tmp_path: Path) -> None:
    goes_on(Life(SHAPE, tmp_path, [Fault(what="kill", which="engine-0", event="Train", count=SAVED)]).live())


def test_something_of_the_run_itself_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, broken = Ring._picture, list[str]()

    def breaks(ring: Ring) -> None:
        if broken:
            raise RuntimeError(broken.pop())
        picture(ring)

    def later(world: World, step: Step) -> None:
        if step.step == SAVED - 1:
            asyncio.get_running_loop().call_later(1.0, broken.append, "no screen")

    monkeypatch.setattr(Ring, "_picture", breaks)
    goes_on(Life(SHAPE, tmp_path, meddle=later).live())


def goes_on(life: Life) -> None:
    """From what it saved; the books of both lives are looked at after each (`tests.chaos.lives.check`)."""
    assert life.failed and life.report is not None and life.report.steps == SAVED
    later = Life(replace(life.shape), life.folder, again=True).live()
    assert not later.failed and [step.step for step in later.steps] == [SAVED + 1, SAVED + 2]
    assert later.report is not None and not later.report.prompts.dropped and None not in later.report.reward.curve
    assert later.weights == uninterrupted(life.shape).weights
