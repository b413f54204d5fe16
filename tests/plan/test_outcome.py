"""A simulated run's few numbers, by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollyard.config import ForecastConfig
from rollyard.plan.forecast import forecast_of
from rollyard.plan.outcome import Cost, Spread, bound, counting, summarize
from rollyard.plan.scenario import Scenario
from rollyard.plan.show import table
from rollyard.types import Activity, Interval
from rollyard.watch.devices import DeviceTime, Lane, PoolTime
from rollyard.watch.report import (
    Counts,
    EvalRewards,
    Finished,
    Lengths,
    Report,
    RewardCurve,
    Usage,
    WeightTraffic,
)
from rollyard.watch.timeline import BESIDE, PhaseSeconds
from rollyard.watch.trace import Mark, Traced

NOTHING = RewardCurve(None, None, ())


WALL_NS = 100 * 10**9


def pools(engine: dict[str, float], trainer: dict[str, float], stall_s: int = 0) -> Usage:
    """Four engines of two devices, that weight syncs hold up, and four devices that train; what they wait for, as shares."""
    found = (("engine", 8, engine), ("trainer", 4, trainer))
    engines = (
        DeviceTime(f"engine-{i}", ("engine",), WALL_NS, {}, {}, 0.0, {}, stall_ns=stall_s * 10**9, devices=2) for i in range(4)
    )
    trainers = DeviceTime("trainer", ("trainer",), WALL_NS, {}, {}, 0.0, {}, devices=4)
    shares = (PoolTime(role, count, 1 - sum(waits.values()), waits, 0) for role, count, waits in found)
    return Usage((*engines, trainers), tuple(shares))


REPORT = Report(
    name="small",
    model="llama-8b",
    placement="separate",
    engine="embedded",
    steps=4,
    wall_s=100.0,
    phases=PhaseSeconds(wall_s=100.0, generate_s=60.0, train_s=30.0, sync_s=10.0, generating_s=60.0),
    generation_tokens=6_000,
    generation_tokens_per_s=100.0,
    reward=NOTHING,
    rewards={},
    eval=EvalRewards(None, None),
    lengths=Lengths(20.0, 15, 40, 64, 0.125),
    slots_busy=0.5,
    decoder="",
    prompts=Counts(10, 8, {"stale": 2}),
    members=Counts(40, 32, {"stale": 8}),
    weights=WeightTraffic("broadcast", 0),
    versions=(),
    lost=(),
    finished=Finished("all steps are done", failed=False),
    software={},
    staleness={0: 300, 1: 100},
    usage=pools({"train": 0.3, "sync": 0.1}, {"generate": 0.6}),
    simulated=True,
)


def scenario(**changes: object) -> Scenario:
    sections = {
        "place": {"placement": "separate", "generate": 4, "train": 4},
        "engine": {"tensor_parallel_size": 2, "slots": 8},
        "rollout": {"groups_per_step": 2, "group_size": 4},
        "cluster": {"hardware": "H100", "price": 3.0},
    }
    return Scenario.model_validate({name: values | dict(changes.pop(name, {})) for name, values in sections.items()} | changes)  # type: ignore[call-overload]


def row(step: int, seconds: float, generate: float, train: float, sync: float, tokens: int) -> dict[str, object]:
    phases = {"generate": generate, "train": train, "sync": sync, "score": 0.0, "tools": 0.0, "eval": 0.0, "checkpoint": 0.0}
    left = seconds - generate - train - sync
    spent = {f"phase/{name}_s": value for name, value in (phases | {"setup": 0.0, "unaccounted": left}).items()}
    return {"step": step, "tokens": 9, "train/tokens": tokens, "seconds": seconds, **spent, **dict.fromkeys(BESIDE, 0.0)}


ROWS = (
    row(1, 40.0, 30.0, 6.0, 4.0, 3_000),
    row(2, 18.0, 9.0, 7.0, 2.0, 900),
    row(3, 20.0, 10.0, 8.0, 1.0, 1_000),
    row(4, 22.0, 11.0, 9.0, 2.0, 1_100),
)


def test_the_first_step_is_in_no_number_of_a_step() -> None:
    found = summarize(REPORT, ROWS, scenario())
    assert (found.devices, found.engines, found.hardware) == (12, 4, "H100")  # 4 engines of 2 devices, and 4 that train
    assert found.step_s == Spread(mean=20.0, median=20.0, p10=18.0, p90=22.0, least=18.0, most=22.0)
    assert (found.trained_tokens_per_s, found.tokens_per_device_s) == (50.0, 50.0 / 12)
    phases = {"generate": 10.0, "score": 0.0, "train": 8.0, "sync": pytest.approx(5 / 3), "checkpoint": 0.0}
    assert found.phases_s == phases | {"rest": pytest.approx(1 / 3)}
    assert found.sync_s == pytest.approx(5 / 3) and found.staleness == {0: 0.75, 1: 0.25}
    # 12 devices at 3.0 an hour are 0.01 a second
    assert found.cost == Cost(pytest.approx(0.2), pytest.approx(1.0), pytest.approx(1e6 / 6_000))
    assert summarize(REPORT, ROWS, scenario(cluster={"price": 0.0})).cost is None


def test_devices_cost_as_long_as_they_are_there() -> None:
    *rest, last = REPORT.usage.devices
    usage = replace(REPORT.usage, devices=(*rest, replace(last, wall_ns=WALL_NS // 4)))
    found = summarize(replace(REPORT, usage=usage), ROWS, scenario())
    assert found.devices == 12 and found.tokens_per_device_s == 50.0 / 9
    assert found.cost is not None and found.cost.run == pytest.approx(0.75)


def test_a_run_without_a_step_has_few_numbers() -> None:
    found = summarize(replace(REPORT, steps=0), (), scenario())
    assert (found.step_s, found.phases_s, found.cost, found.trained_tokens_per_s) == (None, {}, None, 0.0)
    assert found.bound == "nothing"
    assert forecast_of(REPORT, (), scenario()) == ForecastConfig()


def test_the_forecast_has_the_same_numbers() -> None:
    found = forecast_of(REPORT, ROWS, scenario(run={"name": "small"}))
    assert found.model_dump(exclude={"source"}) == {
        "step_s": 20.0,
        "generate_s": 10.0,
        "score_s": 0.0,
        "train_s": 8.0,
        "sync_s": 1.66667,
        "checkpoint_s": 0.0,
        "trained_tokens_per_s": 50.0,
        "engine_busy": 0.6,
        "trainer_busy": 0.4,
        "slots_busy": 0.5,
    }
    assert found.source == "rollyard 0.1.0, small: 3 steps on H100, separate"


@dataclass(frozen=True)
class Done:
    report: Report
    metrics: tuple[dict[str, object], ...]
    traced: Traced


def test_steps_that_do_not_count_are_in_no_number_of_a_choice() -> None:
    """Four steps that end after 40, 58, 78 and 100 s. The engine works in the first two alone, the trainer in the last two."""
    ends = (40, 58, 78, 100)
    lanes = (
        Lane("driver", ("driver",), ()),
        Lane("engine-0", ("engine",), (Interval(Activity.GENERATE, 0, 68 * 10**9, ""),)),
        Lane("trainer-0", ("trainer",), (Interval(Activity.TRAIN, 80 * 10**9, 120 * 10**9, ""),)),
    )
    marks = tuple(Mark(step, seconds * 10**9) for step, seconds in enumerate(ends, 1))
    found = counting(Done(REPORT, ROWS, Traced(lanes, marks, 0, 120 * 10**9)), 2)
    assert (found.phases.wall_s, found.phases.generate_s, found.phases.train_s, found.phases.sync_s) == (42.0, 21.0, 17.0, 3.0)
    engine, trainer = found.usage.pools
    assert (engine.role, engine.busy_share) == ("engine", 10 / 42)  # from 58 s to 68 s, of 42 s
    assert (trainer.role, trainer.busy_share) == ("trainer", 20 / 42)  # from 80 s to 100 s
    assert dict(engine.wait_share) == {"train": 20 / 42, "unexplained": 12 / 42}
    forecast = forecast_of(found, ROWS[1:], scenario())
    assert (forecast.step_s, forecast.trained_tokens_per_s, forecast.engine_busy) == (21.0, 50.0, 0.238095)


@pytest.mark.parametrize(
    ("placement", "phases", "waits", "expected"),
    [
        ("separate", {"generate": 60.0, "train": 30.0}, ({}, {}), "generation"),
        ("separate", {"generate": 40.0, "train": 50.0}, ({}, {}), "training"),
        ("colocated", {"generate": 40.0, "train": 30.0, "sync": 50.0}, ({}, {}), "weight sync"),
        ("colocated", {"generate": 10.0, "score": 20.0}, ({}, {}), "scoring"),
        ("async", {"generate": 20.0, "train": 70.0}, ({"train": 0.05}, {"generate": 0.2}), "generation"),
        ("async", {"generate": 20.0, "train": 70.0}, ({"train": 0.3}, {"generate": 0.1}), "training"),
        ("async", {"generate": 5.0, "train": 20.0, "sync": 60.0}, ({"train": 0.2}, {"generate": 0.1, "sync": 0.6}), "generation"),
        ("async", {"generate": 5.0, "train": 20.0, "sync": 60.0}, ({}, {"generate": 0.1}, 50), "weight sync"),
        ("separate", {}, ({}, {}), "nothing"),
    ],
)
def test_what_a_step_waits_for_most(placement: str, phases: dict[str, float], waits: tuple[Any, ...], expected: str) -> None:
    spent = PhaseSeconds(wall_s=100.0, **{f"{name}_s": value for name, value in phases.items()})
    report = replace(REPORT, placement=placement, phases=spent, usage=pools(*waits), slots_busy=0.2)
    # 8 members for 4 engines: 2 of 8 slots could be at work, and 0.2 x 8 of them were
    assert bound(report, scenario()) == expected


def test_generation_that_waits_for_its_longest() -> None:
    assert bound(replace(REPORT, slots_busy=0.11), scenario()) == "the tail of generation"
    waiting = replace(REPORT, slots_busy=0.2, usage=pools({"generate": 0.4}, {}))  # engines for one another
    assert bound(waiting, scenario()) == "the tail of generation"
    draining = replace(waiting, placement="async", usage=pools({"sync": 0.4}, {"sync": 0.9}))
    assert bound(draining, scenario()) == "the tail of generation"
    assert bound(replace(draining, placement="separate"), scenario()) == "generation"


@pytest.mark.parametrize(
    ("slots", "prompt", "expected"),
    [
        (8, 512, "memory bandwidth"),  # 16 GB of weights at 70 % of 3.35 TB/s take 6.4 ms, 3 ms besides
        (1, 1, "fixed time of a decode step"),  # engines of 8: 0.9 ms of weights, and 3 ms
        (512, 1, "arithmetic"),  # 2 x 8e9 x 512 operations at half of 989 TFLOP/s take 15.5 ms
    ],
)
@pytest.mark.parametrize("traced", [False, True])
def test_what_decoding_is_bound_by(slots: int, prompt: int, expected: str, traced: bool, tmp_path: Path) -> None:
    workload: dict[str, object] = {"prompt_tokens": prompt}
    if traced:
        workload = {"trace": str(tmp_path / "a.jsonl")}
        (tmp_path / "a.jsonl").write_text(json.dumps({"group": 0, "prompt_tokens": prompt, "tokens": 9}))
    place, rollout = {"generate": 1, "train": 8}, {"groups_per_step": slots, "group_size": 1}
    engine, model = {"tensor_parallel_size": 8 if slots == 1 else 1, "slots": slots}, {"path": "llama-8b", "dtype": "bfloat16"}
    found = scenario(
        place=place, rollout=rollout, engine=engine, model=model, workload=workload, weights={"transport": "broadcast"}
    )
    assert bound(replace(REPORT, slots_busy=1.0), found) == f"generation ({expected})"


def shown(report: Report) -> str:
    console = Console(width=110, file=(file := StringIO()))
    console.print(table(summarize(report, ROWS, scenario())))
    return file.getvalue()


def test_the_table_has_what_a_person_asks_for() -> None:
    told = shown(REPORT)
    for words in (
        "small (simulated)",
        "12 × H100, 4 engines",
        "20 s (median), mean 20 s, 80 % from 18 s to 22 s",
        "50 tokens trained a second, 4 a device",
        "generate 10 s, 50%",
        "60.0% busy; waits for training 30.0%, weights 10.0%",
        "50.0% busy while engines step",
        "1.667 s a step",
        "mean 20.0, p50 15, p95 40, max 64 tokens, 12.5% truncated",
        "prompts: 2 stale; members: 8 stale",
        "lag 0 75%, lag 1 25%",
        "0.2 a step, 1 the run, 166.7 a million tokens",
    ):
        assert words in told, words
    assert "lost" not in told and "2 times an engine" in shown(replace(REPORT, lost=("a node failed", "again")))


def test_devices_that_generate_and_train_have_one_line() -> None:
    engine = next(pool for pool in REPORT.usage.pools if pool.role == "engine")
    both = replace(REPORT.usage, pools=(engine, replace(engine, role="trainer")))
    told = shown(replace(REPORT, usage=both))
    assert "devices   60.0% busy; waits for its batch or other trainers 30.0%, weights 10.0%" in told
    assert told.count("% busy; waits") == 1 and shown(REPORT).count("% busy; waits") == 2


def test_programs_get_the_same_as_one_object() -> None:
    found = json.loads(json.dumps(asdict(summarize(REPORT, ROWS, scenario()))))
    assert found["step_s"]["median"] == 20.0 and found["busy"] == {"engine": 0.6, "trainer": 0.4}
    assert found["staleness"] == {"0": 0.75, "1": 0.25} and found["bound"] == "generation"
