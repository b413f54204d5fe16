"""Runs that fail while they train: what they save has a batch that the books have as trained."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollyard.chaos.faults import Fault
from rollyard.chaos.injector import Injector
from rollyard.durable import remove_folder
from rollyard.journal import folder
from rollyard.journal.reader import JournalReader
from rollyard.watch.accounts import Accounts
from rollyard.watch.recorder import Recorder
from rollyard.watch.report import Report
from rollyard.watch.step import Step
from tests.chaos.doubles import Times
from tests.chaos.lives import Life, uninterrupted
from tests.chaos.world import Shape, World

SHAPE = Shape("async", overtaking="never", engines=1, restarts=0, steps=6, save=2, times=Times(train=4.0))
SAVED = 4  # steps: the last one was being trained


def test_its_last_engine_is_lost(tmp_path: Path) -> None:
    goes_on(Life(SHAPE, tmp_path, [Fault(what="kill", which="engine-0", event="Train", count=SAVED)]).live())


def test_something_of_the_run_itself_breaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    picture, broken = Recorder.picture, list[str]()

    def breaks(recorder: Recorder, *shown: Any) -> None:
        if broken:
            raise RuntimeError(broken.pop())
        picture(recorder, *shown)

    def later(world: World, step: Step) -> None:
        if step.step == SAVED - 1:
            asyncio.get_running_loop().call_later(1.0, broken.append, "no screen")

    monkeypatch.setattr(Recorder, "picture", breaks)
    goes_on(Life(SHAPE, tmp_path, meddle=later).live())


def goes_on(life: Life) -> None:
    """From what it saved; the books of both lives are looked at after each (`tests.chaos.lives.check`)."""
    assert life.failed and life.report is not None and life.report.steps == SAVED
    later = Life(replace(life.shape), life.folder, again=True).live()
    assert not later.failed and [step.step for step in later.steps] == [SAVED + 1, SAVED + 2]
    assert later.report is not None and not later.report.prompts.dropped and None not in later.report.reward.curve
    assert later.weights == uninterrupted(life.shape).weights


class Fails:
    """What the disk says to it."""

    def __init__(self, *arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")


@pytest.mark.filterwarnings("ignore:closing the run. OSError")
@pytest.mark.parametrize("what", ["report", "trace", "faults"])
def test_what_cannot_be_written_at_the_end_keeps_nothing_else_from_it(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal is whole, and the run ends for the reason that it ended for."""
    owner, name = {"report": (Report, "write"), "trace": (Accounts, "write_trace"), "faults": (Injector, "_keep")}[what]
    monkeypatch.setattr(owner, name, Fails)
    fault = [] if what == "faults" else [Fault(what="kill", which="engine-0", event="Train", count=SAVED)]
    life = Life(SHAPE, tmp_path, fault).live()
    assert ("no engine is left" in life.failed) == bool(fault) and life.report is not None
    with JournalReader(tmp_path / "run" / "journal.sqlite") as reader:
        assert list(reader.query("SELECT failed FROM incarnations WHERE ended_at IS NOT NULL")) == [(bool(fault),)]


@pytest.mark.filterwarnings("ignore:closing the run. OSError")
def test_a_fault_that_cannot_be_carried_out_ends_the_run_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Injector, "_keep", Fails)
    life = Life(SHAPE, tmp_path, [Fault(what="stall", which="engine-0", after_s=3.0, for_s=1.0)]).live()
    assert "No space left" in life.failed and life.report is not None


def test_a_checkpoint_that_cannot_be_deleted_is_told_of_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = list[str]()

    def busy(path: Path) -> None:
        if not tried:
            tried.append(path.name)
            raise OSError(16, "Device or resource busy")
        remove_folder(path)

    monkeypatch.setattr(folder, "remove_folder", busy)
    shape = replace(SHAPE, save=1, steps=4, options=(("checkpoint.keep", 1),))
    with pytest.warns(RuntimeWarning, match=r"an older checkpoint cannot be deleted.*busy"):
        life = Life(shape, tmp_path).live()
    assert not life.failed and tried and len(list((tmp_path / "run" / "checkpoints").iterdir())) == 1
