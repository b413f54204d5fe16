"""The folder of a simulated run, and `rollyard inspect` on it."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest

from rollyard import cli
from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.journal.folder import RunFolder
from rollyard.plan.leave import check_free, write_folder
from rollyard.plan.outcome import summarize
from rollyard.plan.scenario import Scenario
from rollyard.plan.simulate import Simulated
from rollyard.watch.read import read_report
from tests.plan.sides import Case, simulated

FILES = ["lengths.json", "metrics.jsonl", "report.json", "scenario.toml", "timeline.svg", "trace.json"]


def play(scratch: Path) -> tuple[Simulated, Scenario]:
    scratch.mkdir(exist_ok=True)
    case = Case("async", steps=5)
    done, config = simulated(case, scratch).simulated, case.config(scratch)
    assert done is not None
    return done, Scenario(**{name: getattr(config, name) for name in Config.model_fields})


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Simulated, Scenario, RunFolder]:
    scratch = tmp_path_factory.mktemp("left")
    done, scenario = play(scratch)
    write_folder(done, scenario, scratch / "out")
    return done, scenario, RunFolder(scratch / "out")


def test_it_is_like_a_runs(left: tuple[Simulated, Scenario, RunFolder]) -> None:
    done, scenario, folder = left
    assert sorted(path.name for path in folder.path.iterdir()) == FILES
    report = read_report(folder.report)
    assert report == done.report and report.simulated
    rows = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert sum(row["seconds"] for row in rows) <= report.wall_s
    assert Scenario.model_validate(tomllib.loads(folder.scenario.read_text())) == scenario


def test_the_same_simulation_leaves_the_same_bytes(left: tuple[Simulated, Scenario, RunFolder], tmp_path: Path) -> None:
    _, scenario, folder = left
    again, _ = play(tmp_path / "scratch")
    write_folder(again, scenario, tmp_path / "again")
    for name in FILES:
        told = (tmp_path / "again" / name).read_text().replace(str(tmp_path / "scratch"), str(folder.path.parent))
        assert told == (folder.path / name).read_text(), name


def test_only_a_simulated_run_is_replaced(left: tuple[Simulated, Scenario, RunFolder], tmp_path: Path) -> None:
    done, scenario, _ = left
    write_folder(done, scenario, tmp_path / "out")
    with pytest.raises(ConfigError, match="exists already"):
        write_folder(done, scenario, tmp_path / "out")
    over = scenario.model_copy(update={"run": scenario.run.model_copy(update={"overwrite": True})})
    (tmp_path / "out" / "mine").touch()
    write_folder(done, over, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    (tmp_path / "other").mkdir()
    check_free(tmp_path / "other", overwrite=False)  # there is nothing in it
    (tmp_path / "other" / "mine").touch()
    with pytest.raises(ConfigError, match="something else than a simulated run"):
        check_free(tmp_path / "other", overwrite=True)
    with pytest.raises(ConfigError, match="is a file"):
        check_free(tmp_path / "other" / "mine", overwrite=True)
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["mine"]
    with pytest.raises(ConfigError, match="cannot be written"):
        write_folder(done, scenario, tmp_path / "other" / "mine" / "out")


def test_an_empty_folder_is_taken(left: tuple[Simulated, Scenario, RunFolder], tmp_path: Path) -> None:
    done, scenario, _ = left
    (tmp_path / "out").mkdir()
    write_folder(done, scenario, tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES


def ask(capsys: pytest.CaptureFixture[str], folder: RunFolder, *arguments: str, code: int = 0) -> str:
    assert cli.main(["inspect", str(folder.path), *arguments]) == code
    said = capsys.readouterr()
    return said.err if code else said.out


def test_inspect_shows_what_there_is(left: tuple[Simulated, Scenario, RunFolder], capsys: pytest.CaptureFixture[str]) -> None:
    done, scenario, folder = left
    told = ask(capsys, folder)
    assert "run (simulated)" in told and "all steps are done" in told
    assert json.loads(ask(capsys, folder, "--json")) == json.loads(
        json.dumps(asdict(summarize(done.report, done.metrics, scenario)))
    )
    lines = ask(capsys, folder, "steps", "--limit", "2").splitlines()
    assert lines[0].split()[:3] == ["step", "groups", "tokens"] and lines[-1] == "2 of 5; --limit N shows more"
    rows = [json.loads(line) for line in ask(capsys, folder, "steps", "--json").splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5] and rows[4]["tokens"] == done.metrics[4]["tokens"]
    assert rows[4]["phases"]["train"] == done.metrics[4]["phase/train_s"]


@pytest.mark.parametrize("asked", [("--check",), ("groups",), ("rollout", "1", "0"), ("--sql", "SELECT 1"), ("--life", "0")])
def test_what_needs_a_journal_is_refused(
    left: tuple[Simulated, Scenario, RunFolder], capsys: pytest.CaptureFixture[str], asked: tuple[str, ...]
) -> None:
    told = ask(capsys, left[2], *asked, code=2)
    assert f"{asked[0]} needs a journal, and a simulated run has none" in told


def test_a_damaged_file_of_it_is_named(
    left: tuple[Simulated, Scenario, RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done, scenario, _ = left
    write_folder(done, scenario, tmp_path / "out")
    (tmp_path / "out" / "report.json").write_text("{")
    assert "report.json: not a report" in ask(capsys, RunFolder(tmp_path / "out"), code=1)
    (tmp_path / "out" / "scenario.toml").write_text("[workload]\nsigma = -1.0\n")
    assert "workload.sigma" in ask(capsys, RunFolder(tmp_path / "out"), code=2)


def test_a_picture_of_any_run_is_drawn_from_its_trace(
    left: tuple[Simulated, Scenario, RunFolder], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = left[2], tmp_path / "timeline.svg"
    assert ask(capsys, folder, "--timeline", str(file)) == f"4 devices in {file}\n"
    assert file.read_text() == (folder.path / "timeline.svg").read_text()
    assert "exists already" in ask(capsys, folder, "--timeline", str(file), code=2)
    assert "says no format" in ask(capsys, folder, "--timeline", str(tmp_path / "timeline.png"), code=2)
    assert "in the run's own folder" in ask(capsys, folder, "--timeline", str(folder.path / "mine.svg"), code=2)
    assert "there is no folder" in ask(capsys, folder, "--timeline", str(tmp_path / "no" / "a.svg"), code=2)
    assert "do not go together" in ask(capsys, folder, "--timeline", str(tmp_path / "b.svg"), "steps", code=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    assert "there is no timeline" in ask(capsys, RunFolder(tmp_path / "run"), "--timeline", str(tmp_path / "b.svg"), code=1)
