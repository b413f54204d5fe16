"""Runs in every state: killed, with several lives, failed, stopped, simulated, copied, and folders with little in them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollyard.cli import main
from rollyard.errors import RunFailed
from rollyard.inspect.source import Source
from rollyard.journal.folder import RunFolder
from tests.dashboard.runs import answers, asking, contents, leave, run_of, through
from tests.inspect.runs import write_run

PATHS = ("overview", "steps", "histograms", "timeline", "groups", "rollouts", "config")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """What a run leaves that is killed after some steps: its folder as it was then, taken while the journal was open."""
    scratch = tmp_path_factory.mktemp("killed")
    run = run_of(scratch, 6)
    through(run, lambda step: step.step == 4 and leave(run, scratch / "left"))
    return RunFolder(scratch / "left")


async def test_of_a_killed_run_metrics_and_journal_say_what_there_is(killed: RunFolder) -> None:
    lines = [json.loads(line) for line in killed.metrics.read_text().splitlines()]
    before = contents(killed.path)
    async with asking(killed) as client:
        told = await answers(client, "overview")
        bars = await answers(client, "histograms")
        rows = await answers(client, "rollouts", limit=1000)
        timeline = await answers(client, "timeline")
    assert (told["state"], told["steps"], told["planned"]) == ("killed", 4, 6) and "killed" in told["cause"]
    assert told["tokens"] == sum(line["tokens"] for line in lines)
    assert told["wall_s"] == pytest.approx(sum(line["seconds"] for line in lines))
    assert told["phases"]["train"] == pytest.approx(sum(line["phase/train_s"] for line in lines))
    assert (told["reward"]["last"] == lines[-1]["reward_mean"] and told["transport"] == "in_place") or told["transport"]
    assert told["admitted"] == told["trained"] + sum(told["dropped"].values()) + told["live"] and told["trained"] == 16
    trained = [row for row in rows["rows"] if row["trained"]]
    assert told["members"]["trained"] == len(trained)
    assert sum(told["staleness"].values()) == sum(row["tokens"] for row in trained if row["reward"] is not None)
    assert dict(zip(map(str, bars["staleness"]["lags"]), bars["staleness"]["tokens"], strict=True)) == told["staleness"]
    assert timeline["why"] == "" and {lane["name"] for lane in timeline["lanes"]} == {"driver", "trainer", "engine-0", "engine-1"}
    assert [step for step, _ in timeline["marks"]] == list(range(1, len(timeline["marks"]) + 1)) and timeline["marks"]
    assert timeline["lives"] == [] and timeline["whole_ns"] / 1e9 > 0 and not killed.trace.exists()
    after = contents(killed.path)  # SQLite may build the index of the log anew
    assert [each for each in after.items() if "-shm" not in each[0]] == [each for each in before.items() if "-shm" not in each[0]]


async def test_what_survived_of_two_lives(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    async with asking(run) as client:
        told = await answers(client, "overview")
        rows = await answers(client, "rollouts")
        group = await answers(client, "groups/2")
        steps = await answers(client, "steps")
    assert (told["state"], told["steps"], told["admitted"], told["trained"], told["dropped"]) == ("killed", 3, 5, 3, {"stale": 1})
    assert [(life["failed"], life["begun"]) for life in told["lives"]] == [(True, 0), (None, 2)]
    assert told["staleness"] == {"0": 20, "1": 4} and told["eval"]["first"] == 0.25
    assert rows["total"] == 10 and group["group"]["life"] == 1 and {row["life"] for row in group["members"]} == {1}
    assert [row[:2] for row in steps["rows"]] == [[1, 0], [2, 0], [3, 1]]


async def test_the_report_of_an_earlier_life_is_not_that_of_a_killed_one(tmp_path: Path) -> None:
    """It lies there still: the run was stopped, resumed, and killed."""
    run = run_of(tmp_path, 6)
    through(run, lambda step: step.step == 2 and run.stop("enough for now"))
    async with asking(run.folder) as client:
        told = await answers(client, "overview")
        assert (told["state"], told["cause"], told["steps"]) == ("finished", "enough for now", 2) and told["pools"]
    again = type(run).resume(run.folder.path, stations=run._given)
    through(again, lambda step: step.step == 4 and leave(again, tmp_path / "left"))
    left = RunFolder(tmp_path / "left")
    assert left.report.exists() and left.trace.exists()
    async with asking(left) as client:
        told = await answers(client, "overview")
        assert (told["state"], told["steps"], len(told["lives"]), told["pools"]) == ("killed", 4, 2, [])
        both = await answers(client, "timeline")
        ((life, border),) = both["lives"]
        steps = [(step, at > border) for step, at in both["marks"]]
        assert steps[:2] == [(1, False), (2, False)] and steps[2] == (3, True) and life == 2 and border < both["whole_ns"]
    async with asking(run.folder) as client:
        told = await answers(client, "overview")
        whole = await answers(client, "timeline")
    report = json.loads(run.folder.report.read_text())
    assert whole["marks"][:2] == both["marks"][:2] and [step for step, _ in whole["marks"]] == [1, 2, 3, 4, 5, 6]
    assert whole["lives"] == both["lives"] and {lane["name"] for lane in whole["lanes"]} >= {"trainer", "engine-0", "engine-1"}
    assert (told["state"], told["steps"], told["trained"]) == ("finished", report["steps"], report["trained"]) and report[
        "steps"
    ] == 6


async def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    run = run_of(tmp_path, 6, rollout__min_scored=4, rollout__give_up_after=1)
    with pytest.raises(RunFailed):
        through(run)
    report = json.loads(run.folder.report.read_text())
    async with asking(run.folder) as client:
        told = await answers(client, "overview")
        assert (told["state"], told["cause"]) == ("failed", report["finished"]["cause"])
        live = (await client.get("/api/live")).text
    assert live.startswith("event: end") and '"state":"failed"' in live


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    out = tmp_path_factory.mktemp("simulated") / "run"
    options = ["--gpus", "8xH100", "--steps", "3", "--group-size", "4", "--prompts-per-step", "4", "--mean-tokens", "100"]
    assert main(["simulate", "--preset", "cluster", *options, "--out", str(out), "--json"]) == 0
    return RunFolder(out)


async def test_a_simulated_run_has_numbers_and_a_timeline_and_nothing_to_read(simulated: RunFolder) -> None:
    report = json.loads(simulated.report.read_text())
    async with asking(simulated) as client:
        told: dict[str, Any] = {path: await answers(client, path) for path in PATHS}
        for path in ("groups/0", "rollouts/0/0"):
            answer = await client.get(f"/api/{path}")
            assert answer.status_code == 404 and "simulated" in answer.json()["problem"]
        assert '"state":"simulated"' in (await client.get("/api/live")).text
    seen = told["overview"]
    assert (seen["state"], seen["steps"], seen["planned"], seen["has_journal"]) == ("simulated", 3, 3, False)
    assert (seen["wall_s"], seen["trained"], seen["staleness"]) == (report["wall_s"], report["trained"], report["staleness"])
    assert told["groups"] == {"total": 0, "rows": []} and len(told["steps"]["rows"]) == 3
    assert told["histograms"]["staleness"]["tokens"] == list(report["staleness"].values())
    assert told["timeline"]["whole_ns"] == pytest.approx(report["wall_s"] * 1e9, rel=1e-6)
    assert len(told["timeline"]["lanes"]) > 1 and any(lane["spans"] for lane in told["timeline"]["lanes"])
    assert "scenario.toml" in {option["from"] for option in told["config"]}


async def test_what_a_simulated_run_has_no_model_of_is_absent_and_lengths_are_there(simulated: RunFolder) -> None:
    async with asking(simulated) as client:
        told: dict[str, Any] = {path: await answers(client, path) for path in ("overview", "steps", "histograms")}
        exposed = (await client.get("/metrics")).text
    seen, steps, lengths = told["overview"], told["steps"], told["histograms"]["lengths"]
    assert seen["reward"] == {"first": None, "last": None, "mean": None} and seen["eval"]["first"] is None
    assert told["histograms"]["rewards"]["counts"] == []
    for name in (
        "reward_mean",
        "reward_std",
        "flat_groups",
        "flat_share",
        "train/loss",
        "train/learning_rate",
        "train/ratio_p99",
    ):
        assert [row[steps["columns"].index(name)] for row in steps["rows"]] == [None] * 3, name
    assert "rollyard_train_tokens" in exposed
    for name in ("reward", "flat", "train_loss", "train_entropy", "train_importance", "eval"):
        assert f"rollyard_{name}" not in exposed
    report, whole = json.loads(simulated.report.read_text()), json.loads(simulated.lengths.read_text())
    assert sum(lengths["counts"]) == sum(whole["completions"]) >= 3 * 4 * 4
    assert (lengths["edges"][0], max(whole["tokens"])) == (min(whole["tokens"]), report["lengths"]["max"])


async def test_lengths_that_are_damaged_are_told_and_none_are_none(simulated: RunFolder, tmp_path: Path) -> None:
    place = tmp_path / "there"
    shutil.copytree(simulated.path, place)
    RunFolder(place).lengths.unlink()  # as an earlier version left it
    async with asking(RunFolder(place)) as client:
        assert (await answers(client, "histograms"))["lengths"] == {"edges": [], "counts": []}
        for damaged in ('{"tokens": [1]}', "[]", '{"tokens": [1], "completions": []}', "no JSON"):
            RunFolder(place).lengths.write_text(damaged)
            answer = await client.get("/api/histograms")
            assert answer.status_code == 503 and "lengths.json is damaged" in answer.json()["problem"]


async def test_a_folder_with_hardly_anything_in_it(tmp_path: Path) -> None:
    """The run was killed before it had made its journal."""
    (tmp_path / "config.toml").write_text('[run]\nname = "young"\nsteps = 7\n')
    async with asking(RunFolder(tmp_path)) as client:
        told = {path: await answers(client, path) for path in PATHS}
        assert (await client.get("/metrics")).status_code == 200
    assert (told["overview"]["run"], told["overview"]["state"], told["overview"]["planned"]) == ("young", "killed", 7)
    assert told["groups"]["total"] == 0 and told["steps"]["rows"] == []
    assert [Path(name).name for name in contents(tmp_path)] == ["config.toml"]


async def test_a_folder_that_may_only_be_read(killed: RunFolder, tmp_path: Path) -> None:
    """A copy of a run on a medium; the log has no index there."""
    place = tmp_path / "there"
    shutil.copytree(killed.path, place, ignore=shutil.ignore_patterns("*-shm"))
    before = contents(place)
    async with asking(RunFolder(place)) as client:
        assert (await answers(client, "overview"))["trained"] == 16
    assert contents(place) == before
    with Source(RunFolder(place)) as source:
        assert source.row("SELECT count(*) FROM batches") == (4,)
