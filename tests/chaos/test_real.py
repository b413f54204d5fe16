"""Runs with real processes, several faults each: they end as planned, and leave no process, memory, socket or broken journal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

import rollyard
from rollyard.errors import RollyardError
from rollyard.inspect.check import check
from rollyard.journal.folder import RunFolder
from rollyard.journal.reader import JournalReader
from rollyard.types import DropReason
from rollyard.watch.read import read_report
from rollyard.watch.report import Report
from tests.chaos.lives import leaving_nothing
from tests.rewards import share_of_a
from tests.small import BASE, config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MARK = "ROLLYARD_CHAOS_TEST"  # a variable that all processes of a test inherit
KINDS = {
    "kill": "",
    "stall": "for_s = {seconds:.2f}\n",
    "slow": "for_s = {seconds:.2f}\nfactor = 10\n",
    "corrupt": "for_s = {seconds:.2f}\nhow = '{how}'\n",
}


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Whoever still has it when the test is over was left behind."""
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    yield str(tmp_path)
    left = marked(str(tmp_path)) - {os.getpid()}
    for process in left:
        os.kill(process, signal.SIGKILL)
    assert not left, "processes are left"


def marked(mark: str) -> set[int]:
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except OSError:  # gone, or somebody else's
            continue
    return found


def some(random: Random) -> str:
    """Faults at random, of processes that are replaced."""
    tables = []
    for _ in range(random.randint(3, 5)):
        what, which = random.choice(["kill", "kill", "stall", "slow", "corrupt"]), random.choice(["engine", "engine", "reward"])
        which = "engine" if what == "corrupt" else which
        event, most = random.choice([("SegmentArrived", 40), ("Scored", 12), ("EngineLoaded", 8), ("BatchTrained", 5)])
        more = KINDS[what].format(seconds=random.uniform(0.2, 1.0), how=random.choice(["short", "vocabulary", "version"]))
        tables.append(
            f"[[fault]]\nwhat = '{what}'\nwhich = '{which}'\nevent = '{event}'\ncount = {random.randint(1, most)}\n{more}"
        )
    return "\n".join(tables)


def sound(report: Report, folder: Path) -> None:
    for counts in (report.prompts, report.members):
        assert counts.admitted == counts.trained + sum(counts.dropped.values())
    assert all(lag <= 1 for lag in report.staleness)
    assert not [found for found in check(RunFolder(folder)) if not found.sound]
    assert not (folder / "control.sock").exists() and not list(folder.glob("journal.sqlite-*"))


@pytest.mark.parametrize("seed", [2, 3, 4, 5])  # in which each kind of fault is, of each process that may have it
def test_several_faults(seed: int, tmp_path: Path, mark: str) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text(some(Random(seed)))
    options = {"place.placement": "async", "place.generate": 2, "place.restarts": 5, "rollout.retries": 20}
    run = rollyard.Run(
        config(tmp_path / "run", **options, rollout__max_staleness=1, run__steps=6, run__inject=str(faults)), reward=share_of_a
    )
    with leaving_nothing(collected=True):
        steps = [step.step for step in run]
    assert steps == [1, 2, 3, 4, 5, 6] and run.report is not None
    sound(run.report, tmp_path / "run")
    assert run.report.survival and all(each.outcome for each in run.report.survival)
    dropped = dict(run.report.members.dropped)
    lied = dropped.pop(DropReason.DISTRUSTED, 0)  # what an engine had written that gave wrong answers then
    assert not lied or any(each.what == "corrupt" for each in run.report.survival), dropped
    assert sum(dropped.values()) <= 2 * sum(each.what == "kill" for each in run.report.survival), dropped


def test_a_run_that_stands_still_itself_goes_on_and_blames_nobody(tmp_path: Path, mark: str) -> None:
    """For longer than an engine may be silent, while its engines go on."""
    faults, folder = tmp_path / "faults.toml", tmp_path / "run"
    faults.write_text("[[fault]]\nwhat = 'stall'\nwhich = 'run'\nevent = 'SegmentArrived'\ncount = 10\nfor_s = 3\n")
    options = [f"--warmup.{name}={value}" for name, value in BASE.items()]
    options += [f"--out={folder}", "--steps=6", f"--inject={faults}", "--view=plain", "--rollout.max_staleness=1"]
    options += ["--rollout.group_size=2", "--rollout.groups_per_step=4", "--engine.kernels=plain", "--engine.silent_s=1"]
    options += ["--place.placement=async", "--place.generate=2", "--prompts.held_out=0"]
    command = [sys.executable, "-m", "rollyard", "run", "--preset", "sort", *options]
    done = subprocess.run(command, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = read_report(folder / "report.json")
    assert report.steps == 6 and report.prompts.trained == 24 and not report.prompts.dropped and not report.members.dropped
    sound(report, folder)
    (stood,) = report.survival
    assert stood.outcome == "it went on" and stood.recovered == stood.met and stood.delay_s is not None and stood.delay_s >= 3
    with JournalReader(folder / "journal.sqlite") as journal:
        assert list(journal.query("SELECT engine, text FROM engine_events WHERE event = 'down'")) == []


def test_a_run_whose_half_was_killed_is_resumed(tmp_path: Path, mark: str) -> None:
    """It has a trainer and an engine: the run ends with it, in one line."""
    faults, folder = tmp_path / "faults.toml", tmp_path / "run"
    faults.write_text("[[fault]]\nwhat = 'kill'\nwhich = 'half-1'\nevent = 'Scored'\ncount = 20\n")
    options = {"place.placement": "swap", "rollout.max_staleness": 1, "checkpoint.every": 1, "run.inject": str(faults)}
    first = rollyard.Run(config(folder, **options, run__steps=6, prompts__held_out=0), reward=share_of_a)
    with leaving_nothing(collected=True), pytest.raises(RollyardError, match="half"):
        list(first)
    assert first.report is not None and [each.process for each in first.report.survival] == ["half-1"]
    with leaving_nothing(collected=True):
        later = rollyard.Run.resume(folder, reward=share_of_a)
        steps = [step.step for step in later]
    assert steps[-1] == 6 and later.report is not None and later.report.lives.count == 2
    assert later.report.prompts.trained == 24 and not later.report.prompts.dropped
    sound(later.report, folder)
    assert [each.outcome.partition(" ")[0] for each in later.report.survival] == ["resumed"]


def test_a_run_that_kills_itself_and_is_resumed(tmp_path: Path, mark: str) -> None:
    """With processes of its own. One without: tests/test_killed.py."""
    faults, folder = tmp_path / "faults.toml", tmp_path / "run"
    faults.write_text("[[fault]]\nwhat = 'kill'\nwhich = 'run'\nevent = 'Scored'\ncount = 20\ntimes = 2\n")
    options = [f"--warmup.{name}={value}" for name, value in BASE.items()]
    options += [f"--run.out={folder}", "--run.steps=6", f"--run.inject={faults}", "--checkpoint.every=1", "--watch.view=plain"]
    options += ["--rollout.group_size=2", "--rollout.groups_per_step=4", "--engine.kernels=plain", "--prompts.held_out=0"]
    options += ["--place.placement=async", "--rollout.max_staleness=1"]
    command = [sys.executable, "-m", "rollyard"]
    first = subprocess.run([*command, "run", "--preset", "sort", *options], timeout=120, capture_output=True, text=True)
    assert first.returncode == -signal.SIGKILL, first.stderr
    for expected in (-signal.SIGKILL, 0):
        later = subprocess.run([*command, "resume", str(folder)], timeout=120, capture_output=True, text=True)
        assert later.returncode == expected, later.stderr
    report = read_report(folder / "report.json")
    assert report.steps == 6 and report.prompts.trained == 24 and not report.prompts.dropped
    sound(report, folder)
    assert [(each.life, each.outcome.partition(" ")[0]) for each in report.survival] == [(0, "resumed"), (1, "resumed")]
    assert all(each.met.members == sum(t.members for t in (each.lost, each.repeated, each.recovered)) for each in report.survival)
    assert "kill run" in later.stdout and "resumed after step" in later.stdout
