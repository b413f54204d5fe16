"""What is advised: choices that fit, what is refused with its numbers, what the best depend on, a config that is ready."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from rollyard.config import ForecastConfig
from rollyard.errors import ConfigError
from rollyard.layers import resolve
from rollyard.plan.advice import as_json, named, table
from rollyard.plan.advise import Plan, Planner, Ran, shifted
from rollyard.plan.check import refusal
from rollyard.plan.costs import shape_for
from rollyard.plan.plan_command import write
from rollyard.plan.ready import windowed
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
    base = with_options(Scenario(), options | (pinned or {}))
    base = with_options(base, windowed(base, shape_for(base).window, ()))
    return Space(base, gpus, 8, 1, 8, frozenset(pinned or ()))


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Planner(space("llama-8b", 8), simulate).plan()


def test_the_best_first_and_what_it_costs(plan: Plan) -> None:
    steps = [choice.ran.step_s for choice in plan.choices]
    assert len(steps) >= 3 and steps[:3] == sorted(steps[:3])
    best = plan.choices[0]
    assert best.cost == pytest.approx(8 * 2.0 / 3600 * best.ran.step_s)
    assert plan.simulated <= plan.points / 10


def test_what_little_a_step_costs_is_shown(plan: Plan) -> None:
    console = Console(width=200, file=StringIO())
    console.print(table(replace(plan, choices=(replace(plan.choices[0], cost=0.0012345),)), "2xcpu"))
    assert "0.001234 " in console.file.getvalue() and " 1.234 " in console.file.getvalue()


def test_how_far_it_is_is_shown() -> None:
    told, shown_ = list[str](), list[str]()
    found = Planner(space("llama-8b", 4), simulate, tell=told.append, show=shown_.append).plan()
    assert len(told) == 1 and "points" in told[0]
    assert len(shown_) == found.runs and shown_[-1].startswith(f"simulation {found.runs}: ") and "the least so far" in shown_[-1]
    best = found.choices[0]
    assert best.cost == pytest.approx(4 * 2.0 / 3600 * best.ran.step_s)


def test_every_point_is_accounted_for(plan: Plan) -> None:
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
        assert told["links half as fast"] == pytest.approx(1)  # weights are there in less than anybody would see
    assert all(0 <= shift.first < len(plan.choices) for shift in plan.choices[0].shifts)


def test_a_ready_config(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    said = write(plan, space("llama-8b", 8), path)
    assert "--prompts" in said  # nobody named them
    assert "cannot be run before model.path is the folder of llama-8b" in said and "--model FOLDER" in said
    assert "It cannot be run yet" in path.read_text()
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
    assert "with choice 2" in write(mixed, sp, tmp_path / "plan.toml")


def test_whatever_is_best_something_can_be_run() -> None:
    """Simulated only: vLLM that shares its devices with the trainer."""
    found = Planner(space("llama-8b", 16, {"place.placement": "colocated", "engine.kind": "vllm"}), simulate).plan()
    assert all(choice.obstacle for choice in found.choices)
    assert any("(simulated only)" in line for line in shown(found).splitlines())


def test_what_fails_is_counted_and_the_rest_is_planned() -> None:
    """Runs on two engines and more do not come to their end."""

    def fails(scenario: Scenario, first: int) -> Ran:
        if scenario.place.placement == "async":
            raise ConfigError("the run ends after 0 of 8 steps: no engine is left", where="failures.node_hours", remedy="none")
        return simulate(scenario, first)

    found = Planner(space("llama-8b", 8), fails).plan()
    assert found.choices and all(choice.point.placement != "async" for choice in found.choices)
    lost = next(each for each in found.refused if "no engine is left" in each.problem)
    assert lost.example.placement == "async" and lost.count > 0
    assert found.simulated + found.excluded + found.left + sum(each.count for each in found.refused) == found.points


def test_all_fail() -> None:
    def fails(scenario: Scenario, first: int) -> Ran:
        raise ConfigError("no engine is left", where="failures.node_hours", remedy="fewer failures")

    with pytest.raises(ConfigError, match=r"no choice is possible.*no engine is left"):
        Planner(space("llama-8b", 4), fails).plan()


def test_a_choice_that_fails_where_things_are_otherwise() -> None:
    def fails(scenario: Scenario, first: int) -> Ran:
        if scenario.costs.train_flops < 0.35:
            raise ConfigError("no", where="failures.node_hours", remedy="none")
        return simulate(scenario, first)

    found = Planner(space("llama-8b", 4), fails).plan()
    assert "the run fails" in shown(found)
    json.dumps(as_json(found), allow_nan=False)


def test_what_was_given_and_what_is_not_used_is_said() -> None:
    found = Planner(space("llama-1b", 8, {"place.generate": 2, "place.train": 3}), simulate).plan()
    assert [(each.name, each.value) for each in found.kept] == [("place.generate", 2), ("place.train", 3)]
    text = shown(found)
    assert f"place.generate = 2, which leaves out {found.kept[0].left_out:,} points" in text
    assert any(f"{number} uses {choice.point.devices} of 8 devices" in text for number, choice in enumerate(found.choices, 1))


def test_micro_batches_hold_the_window() -> None:
    """A model's own window of 131,072 is cut to what is asked for: 2 mean prompts and an answer, or what the budget holds."""

    def found(**options: object) -> dict[str, object]:
        given = {name.replace("__", "."): value for name, value in options.items()}
        return windowed(with_options(Scenario(), {"rollout.max_tokens": 8192} | given), 131_072, given.keys())

    assert found() == {"engine.window": 9216, "batch.token_budget": 9216}
    assert found(rollout__max_tokens=1024) == {"engine.window": 8192, "batch.token_budget": 8192}
    assert found(engine__window=20_000) == {"batch.token_budget": 20_000}
    assert found(batch__token_budget=9000) == {"engine.window": 9000}
    assert found(batch__token_budget=9000, engine__window=20_000) == {}
    assert windowed(Scenario(), 2048, ()) == {}


def test_what_a_run_would_refuse_is_not_ready() -> None:
    """A window that no micro-batch holds, heads that vLLM does not divide, a family that no run computes."""
    sp = space("llama-8b", 8)
    point = Point("async", 1, 4, 4, 16, 1, rollover="keep", shard=True)
    good = sp.scenario(point)
    assert refusal(good) == ""
    assert "batch.token_budget" in refusal(with_options(good, {"engine.window": 0}))
    assert "rollout.max_tokens" in refusal(with_options(good, {"rollout.max_tokens": 9000}))
    assert "tensor_parallel_size" in refusal(with_options(good, {"model.path": "smollm2-135m", "engine.window": 4096}))
    assert "mixtral" in refusal(with_options(good, {"model.path": "mixtral-8x7b"}))


@pytest.mark.parametrize(("memory", "told"), [(11.3e9, "engine.pages"), (80e9, "")])
def test_pages_that_a_run_is_told_hold_its_window(memory: float, told: str) -> None:
    """Of a small device what is left has room for a prompt with its answer, and not for the window of 8,192 tokens."""
    options = {"cluster.memory": memory, "place.placement": "colocated", "engine.slots": 16}
    planner = Planner(space("llama-1b", 1, options), simulate, shifts=False)
    assert planner.plan().choices[0].obstacle.startswith(told) and bool(planner.plan().choices[0].obstacle) == bool(told)


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
