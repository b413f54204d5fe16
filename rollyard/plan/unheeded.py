"""Options that change nothing in a simulated run, and why.

A run's options are all options of a scenario, and the same file does for both. What somebody sets and nothing comes of is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from rollyard.layers import value as value_of
from rollyard.plan.passes import passes_of
from rollyard.plan.scenario import Scenario
from rollyard.plan.space import with_options
from rollyard.worker import trains_here, transport_of

USUAL: Final = Scenario()
SILENT: Final = ("default", "preset")  # origins of what nobody set: a preset of runs has a lot that is for runs


@dataclass(frozen=True, slots=True)
class Rule:
    """Why some options have no effect.

    Args:
        options: dotted names; `reward` stands for all of that section.
        where: in which scenarios that is so.
    """

    why: str
    options: tuple[str, ...]
    where: Callable[[Scenario], bool] = lambda scenario: True


def _of(section: str, names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names.split())


def _calm(scenario: Scenario) -> bool:
    return not scenario.failures.node_hours and not scenario.failures.joins


def _chosen(scenario: Scenario) -> bool:
    """Does how weights go follow from what nodes hosts lie on?"""
    place = scenario.place
    return (
        place.apart
        and place.nodes == "spread"
        and scenario.weights.transport in ("auto", "broadcast")
        and not scenario.exchange.folder
    )


def _swaps(scenario: Scenario) -> bool:
    """Halves that lie on several nodes have to say broadcast, so that is heeded."""
    return scenario.place.placement == "swap" and scenario.weights.transport != "broadcast"


def _passes_alike(option: str, scenario: Scenario) -> bool:
    """Does training pass over a batch as often as without it?"""
    usual = with_options(scenario, {option: value_of(USUAL, option)})
    return passes_of(scenario) == passes_of(usual)


RULES: Final = (
    Rule("nothing is shown meanwhile", ("watch",)),
    Rule(
        "no prompt is read",
        _of("prompts", "source path dataset subset split field columns options shuffle epochs waiting chat system"),
    ),
    Rule("the model is another", ("prompts.task", "warmup"), lambda scenario: bool(scenario.model.path)),
    Rule("no base policy is trained", _of("warmup", "steps batch lr seed")),
    Rule("lengths are drawn, and no token", _of("rollout", "temperature top_p top_k stop")),
    Rule("rewards are not modelled", ("reward", *_of("rollout", "filter refills min_scored give_up_after"))),
    Rule("no environment plays", ("environment",)),
    Rule("advantages are not computed", ("advantage.kind",), partial(_passes_alike, "advantage.kind")),
    Rule("advantages are not computed", _of("advantage", "std eps gamma lam")),
    Rule(
        "training is priced by costs, not computed",
        _of(
            "train",
            "lr betas eps weight_decay warmup_steps clip_low clip_high correction_cap correction_floor kl_kind value_lr "
            "value_clip value_body max_grad_norm adapter extra aggregation",
        ),
    ),
    *(
        Rule("training makes no other passes for it", (name,), partial(_passes_alike, name))
        for name in ("train.loss", "train.correction", "train.correction_level")
    ),
    Rule("costs.recompute says so anyway", ("train.recompute",), lambda scenario: scenario.costs.recompute),
    Rule("parameters are in that format", ("train.precision",), lambda scenario: scenario.model.dtype == "bfloat16"),
    Rule("nothing is late", ("train.limit_s", "weights.limit_s", "engine.start_s", "exchange.limit_s")),
    Rule("two jobs are simulated as one", ("exchange.folder",), lambda scenario: not scenario.place.apart),
    Rule("only how weights go hangs on it", ("place.nodes",), lambda scenario: not _chosen(scenario)),
    Rule("a training state goes by links all the same", ("weights.transport",), _swaps),
    Rule("all parameters are trained", ("lora",), lambda scenario: scenario.weights.what == "full"),
    Rule("training is priced by costs, not computed", _of("lora", "alpha dropout")),
    Rule("loads do not fail, and nobody is silent or wrong", ("weights.retries", *_of("engine", "silent_s faults failures"))),
    Rule("no process is started", ("weights.address", *_of("engine", "kernels python extra server url"))),
    Rule("no process is started", _of("place", "runtime ray_address silent_s device threads")),
    Rule("it is the forecast", ("forecast",)),
    Rule("checkpoints are priced, and none is kept", ("checkpoint.keep",)),
    Rule("no engine is lost", ("rollout.retries", "place.restarts"), _calm),
    Rule("no prompt is held out", ("eval",), lambda scenario: not scenario.prompts.held_out),
    Rule("only the embedded engine has such a limit", ("engine.prefill_tokens",), lambda each: each.engine.kind != "embedded"),
    Rule("engines write one after the other's training", ("weights.rollover",), lambda scenario: not scenario.place.apart),
    Rule("nothing is probed", _of("costs", "probe_s evidence_s"), lambda scenario: not scenario.weights.probe),
    Rule("nothing is probed", ("weights.probe_every",), lambda scenario: not scenario.weights.probe),
    Rule(
        "a probe takes no time", _of("weights", "probe probe_every"), lambda each: not each.costs.probe_s + each.costs.evidence_s
    ),
    Rule("engines never make room", ("costs.sleep_s", "costs.offload"), lambda scenario: scenario.place.apart),
    Rule("engines never make room", ("costs.sleep_s",), lambda scenario: scenario.place.placement == "swap"),
    Rule("all numbers travel", ("costs.changed",), lambda scenario: not scenario.weights.delta),
    Rule(
        "weights are not broadcast",
        _of("costs", "parts cards trainer_sends sent_copy"),
        lambda scenario: transport_of(scenario) != "broadcast",
    ),
    Rule("each device is sent its part by its own card", ("costs.cards",), lambda scenario: scenario.costs.parts),
    Rule(
        "an engine is one device", ("costs.tensor_parallel_s", "costs.parts"), lambda each: each.engine.tensor_parallel_size == 1
    ),
    Rule("an engine is one device", ("costs.nodes_s",), lambda scenario: scenario.engine.tensor_parallel_size == 1),
    Rule(
        "engine and driver are one process",
        ("costs.process_s",),
        lambda scenario: scenario.place.placement == "colocated" and trains_here(scenario),
    ),
    Rule("a verdict takes no time", ("costs.score_workers",), lambda each: not each.costs.score_s + each.costs.score_token_s),
    Rule("lengths do not differ", ("workload.between",), lambda scenario: not scenario.workload.sigma),
    Rule("an adapter has a state of its own", ("costs.state_bytes",), lambda scenario: scenario.weights.what == "lora"),
)


def unheeded(scenario: Scenario, origins: Mapping[str, str]) -> Mapping[str, str]:
    """Options that somebody set away from their default and that change nothing, each with why.

    Args:
        origins: of every option, by dotted name.
    """
    found: dict[str, str] = {}
    usual = _leaves(USUAL.model_dump())
    for name, value in _leaves(scenario.model_dump()).items():
        if value == usual[name] or origins[name].split()[0] in SILENT:
            continue
        why = next((rule.why for rule in RULES if _names(rule, name) and rule.where(scenario)), "")
        if why:
            found[name] = why
    return found


def note_of(found: Mapping[str, str]) -> str:
    """In one line, which is empty where there are none."""
    reasons: dict[str, list[str]] = {}
    for name, why in found.items():
        reasons.setdefault(why, []).append(name)
    told = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
    return f"without effect in this simulation: {told}" if told else ""


def _names(rule: Rule, option: str) -> bool:
    return any(option == name or option.startswith(f"{name}.") for name in rule.options)


def _leaves(branch: Mapping[str, Any], above: str = "") -> Mapping[str, Any]:
    """Values by dotted name."""
    found: dict[str, Any] = {}
    for name, value in branch.items():
        whole = f"{above}{name}"
        found |= _leaves(value, f"{whole}.") if isinstance(value, dict) else {whole: value}
    return found
