"""The planner beside the simulator: bounds that hold, and a choice that is the best or near it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollyard.errors import ConfigError
from rollyard.plan.advise import Planner
from rollyard.plan.ran import ran
from rollyard.plan.scenario import Scenario
from rollyard.plan.space import Point, Space, with_options

STEPS = 2  # that count
USUAL = {"model.path": "llama-8b", "model.dtype": "bfloat16", "place.device": "cuda", "rollout.group_size": 4}


def space(gpus: int, **options: Any) -> Space:
    named = {name.replace("__", "."): value for name, value in options.items()}
    base = with_options(Scenario(), USUAL | {"rollout.groups_per_step": 4} | named)
    return Space(base, gpus, 8, 2, 4, frozenset())


def step_s(planner: Planner, point: Point, steps: int) -> float:
    scenario = with_options(planner.space.scenario(point), {"run.steps": planner.first + steps})
    return ran(scenario, planner.first).step_s


@st.composite
def spaces(draw: st.DrawFn) -> Space:
    """Short answers or long ones, much memory or hardly any, devices that compute slowly or move weights slowly."""
    most = draw(st.sampled_from((32, 256, 2048)))
    return space(
        draw(st.sampled_from((2, 4, 8))),
        run__seed=draw(st.integers(0, 99)),
        rollout__max_tokens=most,
        workload__mean_tokens=most * draw(st.sampled_from((0.1, 0.4, 0.8))),
        workload__sigma=draw(st.sampled_from((0.3, 1.0, 1.5))),
        workload__prompt_tokens=draw(st.sampled_from((16, 600))),
        workload__prompt_sigma=draw(st.sampled_from((0.0, 0.5))),
        workload__growth=draw(st.sampled_from((0.0, 0.2, -0.2))),
        costs__train_flops=draw(st.sampled_from((0.35, 0.001))),
        costs__link=draw(st.sampled_from((0.8, 0.01))),
        costs__shared_prompts=draw(st.booleans()),
        rollout__moves=draw(st.sampled_from((0, 2))),
        engine__pages=draw(st.sampled_from((0, 260, 2600))),
        costs__collective=draw(st.sampled_from((0.8, 0.001))),
        cluster__nic=draw(st.sampled_from((0.0, 1e8))),
        costs__minibatch_s=draw(st.sampled_from((0.0, 2.0))),
        costs__microbatch_s=draw(st.sampled_from((0.0, 1.0))),
        train__minibatches=draw(st.sampled_from((1, 3))),
        batch__token_budget=draw(st.sampled_from((1024, 8192))),
        rollout__on_stale=draw(st.sampled_from(("wait", "wait", "drop"))),
        failures__node_hours=draw(st.sampled_from((0.0, 0.0, 0.05))),
    )


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(spaces(), st.data())
def test_no_simulated_step_is_shorter_than_its_bound(made: Space, data: st.DataObject) -> None:
    planner = Planner(made, ran, windows=(STEPS, STEPS, STEPS))
    fitting = planner.fitting()
    points = sorted(fitting, key=lambda point: (point.placement, point.rollover, str(point)))
    if not points:
        return
    chosen = data.draw(st.sampled_from(points))
    _, candidates = planner.candidates({chosen: fitting[chosen]})
    try:
        taken = step_s(planner, chosen, STEPS)
    except ConfigError:  # engines are lost, and it comes to nothing
        assert made.base.failures.node_hours
        return
    assert candidates[0].least_s <= taken * (1 + 1e-9)


def test_parts_of_micro_batches_are_no_bound() -> None:
    """Parameters are gathered for each micro-batch, over hardly any link, and of the batches some just need one less than others.

    As many as the mean batch needs would be 624.6 s.
    """
    lengths = {"rollout__max_tokens": 200, "workload__mean_tokens": 150.0, "workload__sigma": 0.1, "workload__prompt_tokens": 16}
    made = space(4, run__seed=1, costs__collective=0.0002, batch__token_budget=588, **lengths)
    planner = Planner(replace(made, staleness=1), ran, windows=(6, 6, 6))
    point = Point("async", 2, 2, 1, 16, 1, rollover="keep", shard=True)
    _, (candidate,) = planner.candidates({point: planner.fitting()[point]})
    assert 440 < candidate.least_s < step_s(planner, point, 6) < 600


def check_choice(made: Space) -> None:
    """Against all others."""
    planner = Planner(made, ran, windows=(4, 4, 4), shifts=False)
    plan = planner.plan()
    best = min(step_s(planner, point, 4) for point in planner.fitting())
    assert plan.points > 100
    assert plan.simulated <= plan.points / 10
    assert plan.choices[0].ran.step_s <= 1.05 * best


def test_a_tenth_is_simulated_and_the_choice_is_within_5_percent_of_the_best_of_a_hundred() -> None:
    check_choice(space(2, rollout__max_tokens=1024, workload__mean_tokens=200.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"rollout__max_tokens": 256, "workload__mean_tokens": 60.0},
        {"rollout__max_tokens": 4096, "workload__mean_tokens": 300.0, "workload__sigma": 1.4},
        {"rollout__max_tokens": 256, "workload__mean_tokens": 120.0, "costs__train_flops": 0.004},
    ],
    ids=["short answers", "long tail", "training-bound"],
)
def test_the_same_of_some_hundred_and_several_workloads(options: dict[str, Any]) -> None:
    """benchmarks/plan_grid.py does the same with thousands of points."""
    check_choice(space(4, **options))


def test_the_same_seed_gives_the_same_plan() -> None:
    made = space(2, rollout__max_tokens=64)
    first, second = (Planner(made, ran, windows=(2, 2, 2), shifts=False).plan() for _ in range(2))
    assert first == second


def test_what_links_do_is_seen_where_they_are_slow() -> None:
    """With the simulator itself: a version that takes seconds by a slow link takes twice as many by half of it."""

    def slower(rate: float) -> float:
        made = space(2, rollout__max_tokens=64, costs__link=rate, place__placement="separate")
        made = replace(made, pinned=frozenset({"place.placement"}))
        plan = Planner(made, ran, windows=(2, 2, 2), top=1).plan()
        shift = next(shift for shift in plan.choices[0].shifts if shift.what == "links half as fast")
        assert shift.step_s is not None
        return shift.step_s / plan.choices[0].ran.step_s

    assert slower(0.01) > 1.5 > slower(1.0) > 1


def test_busy_shares_are_those_of_the_forecast() -> None:
    made = space(2, rollout__max_tokens=64)
    found = Planner(made, ran, windows=(2, 2, 2), shifts=False, top=1).plan().choices[0].ran
    assert found.busy["engine"] == pytest.approx(found.forecast.engine_busy, rel=1e-5)
    assert found.slots == pytest.approx(found.forecast.slots_busy, rel=1e-5)


def test_tokens_are_those_that_steps_which_count_train_on() -> None:
    """All completions have the same length, so that each step trains on as many: 4 groups of 4, of 64 tokens."""
    made = space(2, rollout__max_tokens=64, rollout__ignore_eos=True)
    found = ran(with_options(made.scenario(Point("async", 1, 1, 1, 16, 2, rollover="keep")), {"run.steps": 6}), 3)
    assert found.trained_tokens_per_s * found.step_s == pytest.approx(16 * 64)


def test_a_run_that_fails_says_so() -> None:
    made = space(2, rollout__max_tokens=64, failures__node_hours=1e-5)
    point = Point("async", 1, 1, 1, 16, 1, rollover="keep")
    with pytest.raises(ConfigError, match=r"the run ends after \d of 4 steps"):
        step_s(Planner(made, ran), point, 1)
