"""The accounts of whole runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import rollyard
from rollyard.config import Config
from rollyard.watch.read import read_report
from rollyard.watch.report import Report
from rollyard.watch.trace import read_trace
from tests.rewards import moody
from tests.tiny import tiny_folder


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    """Config of a small run on a random model; `changes` are dotted options."""
    folder, prompts = tiny_folder(tmp_path, chat=False), tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{letter}bc="}) + "\n" for letter in "abcdefghijkl"))
    values = {
        "run.out": str(tmp_path / "run"),
        "run.steps": 3,
        "model.path": str(folder),
        "prompts.path": str(prompts),
        "prompts.held_out": 2,
        "rollout.group_size": 4,
        "rollout.groups_per_step": 2,
        "rollout.max_tokens": 8,
        "engine.slots": 4,
        "engine.kernels": "plain",
        "place.threads": 1,
    }

    def make_(**changes: object) -> Config:
        given = values | {name.replace("__", "."): value for name, value in changes.items()}
        return rollyard.resolve(environment={}, overrides=given).config

    return make_


def finished(run: rollyard.Run) -> Report:
    list(run)
    report = run.report
    assert report is not None and read_report(run.folder.report) == report
    for device in report.usage.devices:
        assert sum(device.busy_ns.values()) + sum(device.wait_ns.values()) == device.wall_ns == round(report.wall_s * 1e9)
    tokens = report.tokens
    assert tokens.generated == tokens.trained + sum(tokens.dropped.values()) == report.generation_tokens
    assert tokens.live == 0 and sum(report.staleness.values()) == tokens.trained
    return report


def intervals(run: rollyard.Run, device: str, activity: str) -> list[tuple[float, float]]:
    events = json.loads(run.folder.trace.read_text())["traceEvents"]
    (pid,) = (event["pid"] for event in events if event["name"] == "process_name" and event["args"]["name"] == device)
    return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["cat"]) == (pid, activity)]


def overlap(ones: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    return sum(max(min(a[1], b[1]) - max(a[0], b[0]), 0.0) for a in ones for b in others)


def test_one_device_in_turns(make: Callable[..., Config]) -> None:
    run = rollyard.Run(make(), reward=moody)
    report = finished(run)
    (device,) = report.usage.devices
    assert report.forecast is None and not report.simulated
    assert device.roles == ("engine", "trainer") and {pool.role for pool in report.usage.pools} == {"engine", "trainer"}
    assert device.busy_ns.keys() >= {"generate", "train", "sync", "eval", "checkpoint", "setup"}
    assert report.staleness.keys() == {0} and report.tokens.dropped.keys() <= {"no_verdict", "failed", "stopped"}
    assert overlap(intervals(run, device.device, "generate"), intervals(run, device.device, "train")) == 0.0
    assert len(intervals(run, device.device, "train")) == 6  # three steps, and in each the optimizer's part
    rows = {(row.phase, row.operation): row for row in report.usage.operations}
    assert len(rows) == 5 and all(row.seconds for row in rows.values())
    learning = rows["training", "forward and backward"].seconds, rows["training", "optimizer step"].seconds
    assert sum(seconds or 0.0 for seconds in learning) == pytest.approx(device.busy_ns["train"] / 1e9)


def test_a_forecast_stands_beside_what_happened_in_each_life(make: Callable[..., Config]) -> None:
    told = {
        "step_s": 2.0,
        "generate_s": 1.0,
        "train_s": 0.5,
        "trained_tokens_per_s": 64.0,
        "engine_busy": 0.9,
        "trainer_busy": 0.9,
    }
    run = rollyard.Run(make(**{f"forecast__{name}": value for name, value in told.items()}), reward=moody)
    steps = list(run)
    report = run.report
    assert report is not None and report.forecast is not None and report.forecast.steps == 2
    rows = {row.name: row for row in report.forecast.rows}
    step_s = sum(step.seconds for step in steps[1:]) / 2
    assert rows["step_s"].forecast == 2.0 and rows["step_s"].measured == pytest.approx(step_s)
    assert rows["step_s"].ratio == pytest.approx(step_s / 2.0)
    assert rows["train_s"].measured == pytest.approx(sum(step.phases.train_s for step in steps[1:]) / 2)
    parts = ("generate_s", "score_s", "train_s", "sync_s", "checkpoint_s", "rest_s")
    assert sum(rows[name].measured or 0.0 for name in parts) == pytest.approx(step_s)
    traced = read_trace(run.folder.trace)
    (first, _, last), (device,) = [mark.at_ns for mark in traced.marks], traced.lanes[1:]
    spans = sorted((max(begin, first), min(end, last)) for _, begin, end, _ in device.intervals if end > first and begin < last)
    busy_ns, until = 0, first
    for begin, end in spans:
        busy_ns, until = busy_ns + max(end - max(begin, until), 0), max(until, end)
    assert rows["engine_busy"].measured == pytest.approx(busy_ns / (last - first), rel=1e-3)
    assert read_report(run.folder.report) == report
    assert [mark.step for mark in read_trace(run.folder.trace).marks] == [1, 2, 3]
    again = rollyard.Run.resume(run.folder.path, {"run.steps": 4}, reward=moody)
    (step,) = again
    assert again.config.forecast == run.config.forecast and again.report is not None and again.report.forecast is not None
    assert again.report.forecast.steps == 1 and again.report.forecast.rows[0].measured == pytest.approx(step.seconds)


@pytest.mark.slow
def test_two_pools_that_overlap(make: Callable[..., Config]) -> None:
    config = make(place__placement="async", place__generate=2, rollout__max_staleness=1, run__steps=6, rollout__max_tokens=40)
    run = rollyard.Run(config, reward=lambda prompt, completion: float(len(completion)))
    report = finished(run)
    assert [(device.device, device.roles) for device in report.usage.devices] == [
        ("engine-0", ("engine",)),
        ("engine-1", ("engine",)),
        ("trainer-0", ("trainer",)),
    ]
    writing = intervals(run, "engine-0", "generate") + intervals(run, "engine-1", "generate")
    assert overlap(writing, intervals(run, "trainer-0", "train")) > 0.0
    assert 1 in report.staleness and report.staleness.keys() <= {0, 1}
    for device in report.usage.devices[:2]:
        assert device.transfer_ns > 0 and device.stall_ns > 0 and device.hidden_ns <= device.transfer_ns


@pytest.mark.slow
def test_two_halves_that_trade(make: Callable[..., Config]) -> None:
    config = make(place__placement="swap", rollout__max_staleness=1, run__steps=4)
    report = finished(rollyard.Run(config, reward=lambda prompt, completion: float(len(completion))))
    assert [device.roles for device in report.usage.devices] == [("engine", "trainer")] * 2
    assert all(device.busy_ns["train"] for device in report.usage.devices)
    assert [pool.devices for pool in report.usage.pools] == [2, 2]
