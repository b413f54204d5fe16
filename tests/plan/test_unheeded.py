"""Every option of a scenario changes what comes of it, is refused, or is told to change nothing."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import BaseModel

from rollyard.cli import main
from rollyard.errors import ConfigError
from rollyard.layers import resolve_tree
from rollyard.plan.check import check_scenario
from rollyard.plan.costs import costs_of
from rollyard.plan.outcome import summarize
from rollyard.plan.scenario import Scenario
from rollyard.plan.simulate import simulate
from rollyard.plan.unheeded import RULES, note_of, unheeded

BASE: Mapping[str, object] = {
    "model.path": "smollm2-135m",
    "cluster.hardware": "A100-80",
    "place.placement": "async",
    "place.generate": 2,
    "place.train": 2,
    "rollout.groups_per_step": 3,
    "rollout.group_size": 3,
    "rollout.max_tokens": 64,
    "rollout.max_staleness": 1,
    "engine.slots": 4,
    "run.steps": 3,
}
COLOCATED = {"place.placement": "colocated", "place.generate": 1, "rollout.max_staleness": 0}
ALONE = {"place.train": 1}  # its training waits for no exchange
SHARED = {"train.shard": True}
UNEVEN = {"workload.sigma": 2.0, "rollout.max_tokens": 512, "rollout.group_size": 8, "run.steps": 8}
LOST = {"failures.node_hours": 0.0002, "failures.restart_s": 0.5, "cluster.node": 1, "run.steps": 8}
# Where an option has its effect: what is simulated beside it, where the base would not show it.
ROOM: Mapping[str, Mapping[str, object]] = {
    "rollout.moves": UNEVEN | {"engine.slots": 2},
    "rollout.overtaking": UNEVEN,
    "rollout.on_stale": UNEVEN,
    "rollout.retries": LOST | {"place.restarts": 50},
    "place.restarts": LOST | {"rollout.retries": 50},
    "advantage.kind": ALONE,
    "train.loss": ALONE | {"train.minibatches": 2},
    "train.correction": ALONE | {"train.minibatches": 2},
    "train.correction_level": ALONE,
    "advantage.overlong": ALONE | {"workload.mean_tokens": 40.0},
    "train.kl": ALONE,
    "train.minibatches": {"rollout.groups_per_step": 4},
    "engine.page_tokens": {"engine.pages": 50},
    "engine.prefill_tokens": {"engine.kind": "embedded"},
    "weights.probe": {"costs.probe_s": 0.1},
    "weights.probe_every": {"costs.probe_s": 0.1, "weights.rollover": "abort"},
    "weights.delta": {"weights.transport": "broadcast"},
    "eval.every": {"prompts.held_out": 3},
    "eval.samples": {"prompts.held_out": 3},
    "exchange.folder": COLOCATED,
    "cluster.cores": {"costs.message_s": 0.1},
    "cluster.nic": {"weights.transport": "broadcast", "cluster.node": 2},
    "costs.cards": {"weights.transport": "broadcast", "cluster.node": 2},
    "cluster.host": {"weights.transport": "shared_memory"},
    "costs.sent_copy": {"weights.transport": "broadcast"},
    "costs.trainer_sends": {"weights.transport": "broadcast", "cluster.node": 2, "cluster.nic": 1e8},
    "costs.state_bytes": SHARED,
    "costs.gather": SHARED | {"cluster.link": 1e9},
    "costs.collective": SHARED,
    "costs.stage_devices": {"costs.microbatch_s": 0.1, "batch.token_budget": 64},
    "costs.stages": {"costs.microbatch_s": 0.1},
    "costs.changed": {"weights.delta": True},
    "costs.disk": {"weights.transport": "checkpoint"},
    "costs.score_workers": {"costs.score_s": 1.0},
    "costs.sleep_s": COLOCATED,
    "costs.offload": COLOCATED,
    "workload.between": {"workload.sigma": 1.5},
}
# What is set, where not simply something else.
VALUES: Mapping[str, object] = {
    "cluster.memory": 50e9,
    "cluster.bandwidth": 1e11,
    "cluster.flops": 1e12,
    "cluster.link": 1e8,
    "cluster.nic": 1e8,
    "cluster.host": 1e8,
    "train.minibatches": 2,
    "train.loss": "gspo",
    "advantage.kind": "gae",
    "engine.dtype": "bfloat16",
    "costs.decode_flops": 0.001,
    "costs.state_devices": 2,
    "costs.stages": 2,
    "costs.stage_devices": 2,
    "costs.collective": 0.001,
    "costs.score_workers": 1,
    "weights.probe_every": 2,
    "failures.node_hours": 0.0002,
    "rollout.retries": 0,
    "place.restarts": 0,
    "failures.joins": ("1:-1",),
    "place.placement": "separate",
}
LEAVES = ("run.out", "run.overwrite")  # say where what came of it is left


def options(tree: type[BaseModel], above: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Name, type and default of each."""
    for name, field in tree.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from options(field.annotation, f"{above}{name}.")
        else:
            yield f"{above}{name}", field.annotation, field.default


def another(name: str, kind: Any, usual: Any) -> object:
    """A value that it does not have by default."""
    if name in VALUES:
        return VALUES[name]
    if typing.get_origin(kind) is typing.Literal:
        return next(value for value in typing.get_args(kind) if value != usual)
    if isinstance(usual, bool):
        return not usual
    if isinstance(usual, int):
        return usual + 1
    if isinstance(usual, float):
        return usual / 2 or 0.5
    return "something" if isinstance(usual, str) else ("something",)


def resolved(overrides: Mapping[str, object]) -> Any:
    return resolve_tree(Scenario, check_scenario, environment={}, overrides=overrides)


COME: dict[str, object] = {}


def comes_to(overrides: Mapping[str, object]) -> object:
    key = repr(sorted(overrides.items()))
    if key not in COME:
        scenario = resolved(overrides).config
        found = simulate(scenario)
        summary = summarize(found.report, found.metrics, scenario)
        COME[key] = summary, found.steps_s, found.report.wall_s, costs_of(scenario).memory, found.report.usage
    return COME[key]


@pytest.mark.parametrize(("name", "kind", "usual"), [pytest.param(*each, id=each[0]) for each in options(Scenario)])
def test_an_option_changes_something_or_is_refused_or_told(name: str, kind: Any, usual: Any) -> None:
    if name in LEAVES:
        return
    base = BASE | ROOM.get(name, {})
    value = another(name, kind, base.get(name, usual))
    asked = {**base, name: value}
    try:
        found = resolved(asked)
        told, outcome = unheeded(found.config, found.origins), comes_to(asked)
    except ConfigError:
        return
    if name in told:
        assert outcome == comes_to(base), f"{name} is told to change nothing"
        assert name in note_of(told)
    else:
        assert outcome != comes_to(base), f"{name} = {value!r} changes nothing, and nobody is told"


@pytest.mark.parametrize(
    ("name", "value", "beside"),
    [
        ("train.loss", "cispo", {"train.minibatches": 2}),
        ("train.loss", "gspo", {}),  # of one step: each token is compared with itself
        ("train.correction", "none", {}),
        ("train.correction", "none", {"train.minibatches": 2, "costs.logprob_passes": 1}),  # another trainer's are said
        ("advantage.kind", "rloo", {}),
        ("train.precision", "bfloat16", {"model.dtype": "bfloat16"}),
    ],
)
def test_what_passes_as_often_and_multiplies_as_before_is_told(name: str, value: str, beside: dict[str, object]) -> None:
    found = resolved(BASE | ALONE | beside | {name: value})
    assert name in unheeded(found.config, found.origins)
    assert comes_to(BASE | ALONE | beside | {name: value}) == comes_to(BASE | ALONE | beside)


def test_one_line_says_what_a_user_set_in_vain(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a preset of runs only what it was given besides."""
    short = ["simulate", "--preset", "small", "--steps", "2", "--json"]
    assert main([*short, "--train.lr", "0.1", "--reward.workers", "2", "--checkpoint.keep=3"]) == 0
    told = "without effect in this simulation: reward.workers (rewards are not modelled); train.lr (training is priced by costs, "
    told += "not computed); checkpoint.keep (checkpoints are priced, and none is kept)"
    assert json.loads(capsys.readouterr().out)["notes"] == [told]
    assert main([*short, "--prompts.held_out", "4"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []  # evaluations are simulated


def test_what_every_rule_names_is_an_option() -> None:
    known = [name for name, _, _ in options(Scenario)]
    for rule in RULES:
        for named in rule.options:
            assert any(name == named or name.startswith(f"{named}.") for name in known), named
