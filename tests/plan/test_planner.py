"""The planner beside the simulator: bounds that hold, and a choice that is the best or near it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
    )


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(spaces(), st.data())
def test_no_simulated_step_is_shorter_than_its_bound(made: Space, data: st.DataObject) -> None:
    planner = Planner(made, ran, windows=(STEPS, STEPS, STEPS))
    fitting = planner.fitting()
    points = sorted(fitting, key=lambda point: (point.placement, point.rollover, str(point)))
    if not points:
        return
    chosen = data.draw(st.sampled_from(points))
    _, candidates = planner.candidates({chosen: fitting[chosen]})
    assert candidates[0].least_s <= step_s(planner, chosen, STEPS) * (1 + 1e-9)


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
