"""What is advised: choices that fit, what is refused with its numbers, what the best depend on, a config that is ready."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.config import ForecastConfig
from rollyard.errors import ConfigError
from rollyard.layers import resolve
from rollyard.plan.advice import as_json, named, table
from rollyard.plan.advise import Plan, Planner, Ran, shifted
from rollyard.plan.plan_command import write
from rollyard.plan.scenario import Scenario
from rollyard.plan.space import Point, Space, with_options


def simulate(scenario: Scenario, first: int) -> Ran:
    """A stand-in: devices that generate, then (or, with async, beside that) devices that train."""
    place, tokens = scenario.place, scenario.workload.mean_tokens * scenario.rollout.groups_per_step
    engines = place.generate if place.apart else place.train
    wide = scenario.engine.tensor_parallel_size
    written = 1e-3 * tokens / scenario.costs.decode_bandwidth / (engines * wide) ** 0.9 + 0.3
    trained = 1e-3 * tokens / scenario.costs.train_flops / (place.train * (1 if place.apart else wide)) ** 0.9
    step_s = max(written, trained) if place.placement == "async" else written + trained
    forecast = ForecastConfig(source="a stand-in", step_s=step_s, train_s=trained)
    return Ran(step_s, tokens / step_s, {"engine": 0.9, "trainer": 0.5}, 0.7, "generation", forecast)


def space(model: str, gpus: int, pinned: dict[str, object] | None = None) -> Space:
    options = {
        "model.path": model,
        "model.dtype": "bfloat16",
        "place.device": "cuda",
        "rollout.groups_per_step": 16,
        "rollout.max_tokens": 2048,
        "workload.mean_tokens": 500.0,
        "cluster.price": 2.0,
    }
    return Space(with_options(Scenario(), options | (pinned or {})), gpus, 8, 1, 8, frozenset(pinned or ()))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Planner(space("llama-8b", 8), simulate).plan()


def test_the_best_first_and_what_it_costs(plan: Plan) -> None:
    steps = [choice.ran.step_s for choice in plan.choices]
    assert len(steps) >= 3 and steps[:3] == sorted(steps[:3])
    best = plan.choices[0]
    assert best.cost == pytest.approx(8 * 2.0 / 3600 * best.ran.step_s)
    assert plan.simulated <= plan.points / 10
    assert plan.simulated + plan.excluded + plan.left + sum(each.count for each in plan.refused) == plan.points


def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    """32e9 parameters in bfloat16 with gradient and moments are 256 GB: too much for 3 devices that train."""
    found = Planner(space("qwen2.5-32b", 16), simulate).plan()
    refused = [each for each in found.refused if each.where == "place.train"]
    assert refused and all("GB" in each.problem and "optimizer" in each.problem for each in refused)
    assert all(choice.point.training > 3 for choice in found.choices)
    for each in refused:
        assert each.nearest is not None and each.nearest.training > each.example.training


def test_nothing_fits() -> None:
    with pytest.raises(ConfigError, match=r"no choice is possible.*GB") as caught:
        Planner(space("llama-70b", 2), simulate).plan()
    assert caught.value.remedy


def test_heads_that_do_not_divide() -> None:
    found = Planner(space("qwen2.5-7b", 16), simulate).plan()
    assert any("28 attention heads" in each.problem for each in found.refused)
    assert all(choice.point.tensor_parallel != 8 for choice in found.choices)


def test_what_the_best_depend_on(plan: Plan) -> None:
    for choice in plan.choices:
        told = {shift.what: shift.step_s / choice.ran.step_s for shift in choice.shifts}
        assert set(told) == set(shifted(space("llama-8b", 8).base))
        assert told["10 % longer answers"] > 1.01
        assert told["links half as fast"] == pytest.approx(1)
    assert all(0 <= shift.first < len(plan.choices) for shift in plan.choices[0].shifts)


def test_a_ready_config(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    said = write(plan, space("llama-8b", 8), path)
    assert "--prompts" in said  # nobody named them
    config = resolve(file=path, environment={}, overrides={"prompts.task": "sort"}).config
    ready = next(choice for choice in plan.choices if not choice.obstacle)
    assert config.place.placement == ready.point.placement
    assert (config.place.generate, config.place.train, config.engine.slots) == (
        ready.point.generate,
        ready.point.train,
        ready.point.slots,
    )
    assert config.forecast == ready.ran.forecast
    assert config.rollout.groups_per_step == 16
    assert (config.engine.pages > 0) == (config.engine.kind == "embedded")  # every slot at 131,072 tokens is too much
    assert "workload" not in tomllib.loads(path.read_text())


def test_what_cannot_be_run_is_never_written_as_ready(plan: Plan, tmp_path: Path) -> None:
    """Colocated with one training state over all devices is only simulated."""
    point = Point("colocated", 1, 8, 1, 16, shard=True)
    sp = space("llama-8b", 8)
    choices = [replace(choice, point=point, obstacle="train.shard: no") for choice in plan.choices]
    assert "not written" in write(replace(plan, choices=tuple(choices)), sp, tmp_path / "plan.toml")
    assert not (tmp_path / "plan.toml").exists()
    mixed = replace(plan, choices=(*choices[:1], *[each for each in plan.choices if not each.obstacle]))
    assert "of 2" in write(mixed, sp, tmp_path / "plan.toml")


def test_whatever_is_best_something_can_be_run() -> None:
    """Simulated only: vLLM that shares its devices with the trainer."""
    found = Planner(space("llama-8b", 16, {"place.placement": "colocated", "engine.kind": "vllm"}), simulate).plan()
    assert all(choice.obstacle for choice in found.choices)
    assert any("(simulated only)" in line for line in shown(found).splitlines())


def test_as_it_is_read(plan: Plan) -> None:
    text = shown(plan)
    best = plan.choices[0]
    assert named(best.point).split(",")[0] in text
    assert "10 % longer answers" in text and "refused" in text and "of 1,000" in text
    found = json.loads(json.dumps(as_json(plan)))
    assert found["choices"][0]["options"]["place.placement"] == best.point.placement
    assert found["choices"][0]["devices"] == 8


def shown(plan: Plan) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(table(plan, "8xH100"))
    return capture.get()
