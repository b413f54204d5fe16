"""What a scenario's options must satisfy: what a run's must, as far as the core goes by it, and some of their own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from rollyard.errors import ConfigError
from rollyard.layers import RUNS, Resolved, options, presets, resolve, resolve_tree
from rollyard.plan.check import check_scenario, obstacle
from rollyard.plan.joins import Join, joins_of
from rollyard.plan.kinds import FOLDERS, SCENARIOS
from rollyard.plan.scenario import Scenario

ASYNC = {"place.placement": "async", "place.generate": 4}
TRACE = {"workload.trace": "a.jsonl"}
EOS = {"rollout.ignore_eos": True}


def resolved(values: Mapping[str, object], preset: str = "", file: Path | None = None) -> Resolved[Scenario]:
    """Of the base policy of a task, unless something else is said."""
    given = ({} if preset else {"prompts.task": "sort"}) | dict(values)
    return resolve_tree(Scenario, check_scenario, preset=preset, file=file, environment={}, overrides=given, folders=FOLDERS)


@pytest.mark.parametrize(
    ("values", "where", "told"),
    [
        ({"workload.mean_tokens": 65}, "workload.mean_tokens", "a mean of 65 tokens is not to be had where"),
        ({"workload.mean_tokens": 64}, "workload.mean_tokens", "use less than 64"),
        ({"workload.mean_tokens": 0.5}, "workload.mean_tokens", "use at least 1"),
        ({"workload.mean_tokens": float("nan")}, "workload.mean_tokens (command line)", "finite number"),
        ({"workload.mean_tokens": "many"}, "workload.mean_tokens (command line)", "valid number"),
        ({"workload.sigma": 5}, "workload.sigma (command line)", "less than or equal to 4"),
        ({"workload.between": 1.5}, "workload.between (command line)", "less than or equal to 1"),
        ({"workload.growth": -1}, "workload.growth (command line)", "greater than -1"),
        ({"workload.prompt_tokens": 0}, "workload.prompt_tokens (command line)", "greater than or equal to 1"),
        (TRACE | {"workload.sigma": 0.5}, "workload.sigma", "lengths are those of a.jsonl"),
        (TRACE | {"workload.mean_tokens": 5}, "workload.mean_tokens", "leave it out"),
        (TRACE | EOS | {"workload.growth": 0.1}, "workload.growth", "every completion has 64 tokens"),
        (EOS | {"workload.growth": 0.1}, "workload.growth", "every completion has 64 tokens"),
        ({"costs.step_s": 1e300}, "costs.step_s (command line)", "less than or equal to 1000000000"),
        ({"cluster.bandwidth": 1e-300}, "cluster.bandwidth (command line)", "use 0, or at least 1000"),
        ({"costs.disk": 1e-300}, "costs.disk (command line)", "greater than or equal to 1000"),
        ({"costs.link": 1e-300}, "costs.link (command line)", "greater than or equal to 0.000001"),
        ({"failures.node_hours": 1e-300}, "failures.node_hours (command line)", "use 0, or at least 1e-06"),
        ({"cluster.price": -1}, "cluster.price (command line)", "greater than or equal to 0"),
        ({"failures.restart_s": 5}, "failures.restart_s", "add --failures.node_hours"),
        (ASYNC | {"failures.joins": "5"}, "failures.joins", "'5' is not STEP:+N or STEP:-N"),
        (ASYNC | {"failures.joins": "5:3"}, "failures.joins", "give such as 20:+8"),
        (ASYNC | {"failures.joins": "5:+0"}, "failures.joins", "'5:+0' is no engine"),
        (ASYNC | {"failures.joins": "٣:+1"}, "failures.joins", "is not STEP"),
        (ASYNC | {"failures.joins": "100:+1"}, "failures.joins", "use a step from 1 to 99"),
        (ASYNC | {"failures.joins": "0:+1"}, "failures.joins", "use a step from 1 to 99"),
        (ASYNC | {"failures.joins": "5:+1,9:-5"}, "failures.joins", "5 engines leave after step 9, and 5 are there"),
        ({"failures.joins": "5:+1"}, "failures.joins", "none comes or goes"),
        ({"environment.name": "calculator"}, "environment.name", "no environment plays"),
        ({"run.inject": "faults.toml"}, "run.inject", "--failures.node_hours 1000"),
        ({"engine.batching": "static"}, "engine.batching", "use continuous"),
        ({"place.generate": 2}, "place.generate", "2 more are asked for"),
        (ASYNC | {"weights.transport": "in_place"}, "weights.transport", "in its own process"),
        ({"place.placement": "swap", "rollout.max_staleness": 1, "place.train": 2}, "place.train", "use 1 with placement swap"),
        ({"rollout.max_staleness": 1}, "rollout.max_staleness", "nothing is 1 versions old"),
        ({"rollout.group_size": 1}, "rollout.group_size", "grpo compares"),
        ({"prompts.task": ""}, "model.path", "no model is named"),
        ({"prompts.task": "srot"}, "model.path", "a name such as qwen2.5-7b"),
        ({"run.name": "a/b"}, "run.name", "not the name of one folder"),
        ({"workload.means_tokens": 5}, "command line", "did you mean workload.mean_tokens?"),
    ],
)  # fmt: skip
def test_a_mistake_says_what_where_and_what_would_be_right(values: Mapping[str, object], where: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolved(values)
    assert raised.value.where == where and told in str(raised.value)


def test_what_no_engine_does_yet_may_be_simulated_and_is_told() -> None:
    sharing = resolved({"engine.kind": "vllm", "engine.tensor_parallel_size": 8, "train.shard": True, "place.train": 8})
    assert obstacle(sharing.config).startswith("train.shard: with placement colocated")
    assert "vllm has a process" in obstacle(resolved({"engine.kind": "vllm", "engine.tensor_parallel_size": 8}).config)
    assert "takes no notice" in obstacle(resolved(ASYNC | {"engine.tensor_parallel_size": 8}).config)
    assert (
        obstacle(resolved(ASYNC | {"engine.kind": "vllm", "engine.tensor_parallel_size": 8, "prompts.task": "sort"}).config) == ""
    )
    assert obstacle(resolved(ASYNC).config) == "", "nobody names prompts of what is simulated"


def test_joins_come_in_their_order() -> None:
    assert joins_of(resolved(ASYNC | {"failures.joins": "30:-2, 5:+16,9:+1"}).config) == (Join(5, 16), Join(9, 1), Join(30, -2))


@pytest.mark.parametrize("preset", presets(SCENARIOS))
def test_every_preset_is_a_scenario_that_could_run(preset: str) -> None:
    found = resolved({}, preset)
    assert found.config.model.path and obstacle(found.config) == ""


def test_presets_of_runs_are_scenarios_and_none_of_the_others_is_a_run(tmp_path: Path) -> None:
    assert set(presets(SCENARIOS)) >= {"small", "cluster", "thousand"} and not set(presets(SCENARIOS)) & set(presets(RUNS))
    with pytest.raises(ConfigError, match="there is no preset 'cluster'"):
        resolve(preset="cluster", environment={})
    with pytest.raises(ConfigError, match=r"one of: .*cluster.*sort"):
        resolved({}, "clutser")
    mine = tmp_path / "mine.toml"
    mine.write_text('[rollout]\nmax_tokens = 30\n[workload]\nmean_tokens = 7\n[cluster]\nhardware = "H200"')
    both = resolved({"run.seed": "5"}, "sort", mine)
    assert both.config.workload.mean_tokens == 7 and both.config.rollout.max_tokens == 30 and both.config.train.lr == 5e-4
    assert both.origins["cluster.hardware"] == f"file {mine}" and both.origins["train.lr"] == "preset sort"


def test_every_option_of_a_run_is_one_of_a_scenario() -> None:
    assert {each.name for each in options()} < {each.name for each in options(Scenario)}
    assert all(each.description for each in options(Scenario))
