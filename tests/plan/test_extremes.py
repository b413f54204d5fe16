"""Numbers that nobody means: each option of a scenario at its ends, and far outside, is simulated or refused, never worse."""

from __future__ import annotations

import math

import pytest

from rollyard.errors import ConfigError
from rollyard.layers import options, resolve_tree
from rollyard.plan.check import check_scenario
from rollyard.plan.outcome import summarize
from rollyard.plan.scenario import Scenario
from rollyard.plan.show import table
from rollyard.plan.simulate import simulate

SECTIONS = ("cluster", "workload", "costs", "failures")
NAMES = [each.name for each in options(Scenario) if each.name.split(".")[0] in SECTIONS]
USUAL = {
    "model.path": "smollm2-135m", "model.dtype": "bfloat16", "place.placement": "separate", "place.generate": 2,
    "rollout.groups_per_step": 2, "rollout.group_size": 2, "rollout.max_tokens": 32, "run.steps": 2, "workload.prompt_tokens": 20,
    "weights.limit_s": 1e30, "weights.transport": "broadcast", "costs.score_s": 0.01, "weights.delta": True,
}  # fmt: skip
VALUES = ("1e300", "1e21", "1e9", "1000000000", "1" + "0" * 400, "1e-300", "5e-324", "1e-6", "0", "1", "-1", "nan", "inf")


@pytest.mark.parametrize("name", NAMES)
def test_an_option_at_its_ends_is_simulated_or_refused(name: str) -> None:
    for value in VALUES:
        try:
            scenario = resolve_tree(Scenario, check_scenario, environment={}, overrides=USUAL | {name: value}).config
            found = simulate(scenario)
        except ConfigError:
            continue
        summary = summarize(found.report, found.metrics, scenario)
        assert 0 <= summary.wall_s < math.inf and table(summary) is not None, value
