"""The config of a choice, for `rollyard run`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import tomli_w

from rollyard.config import Config
from rollyard.plan.scenario import Scenario
from rollyard.plan.trace import read_trace

LONG: Final = 2  # prompts of this many times the mean have room for a whole answer


def config_of(scenario: Scenario) -> Config:
    """The options of the run among those of a scenario."""
    return Config(**{name: getattr(scenario, name) for name in Config.model_fields})


def windowed(base: Scenario, limit: int, said: Collection[str]) -> dict[str, Any]:
    """Options that give it a window that micro-batches hold, as a run asks for: a model's own is often far longer.

    Args:
        limit: tokens of the model's own; 0: not said.
        said: options that the user gave, and that stay.
    """
    window, budget = base.engine.window or limit, base.batch.token_budget
    if window <= budget:
        return {}
    found: dict[str, Any] = {}
    if "engine.window" not in said:
        room = budget if "batch.token_budget" in said else max(budget, _longest_prompt(base) + base.rollout.max_tokens)
        window = found["engine.window"] = min(window, room)
    if "batch.token_budget" not in said:
        found["batch.token_budget"] = max(budget, window)
    return found


def _longest_prompt(base: Scenario) -> int:
    """Tokens that a prompt should have room for: those of a trace, or well more than the mean of those that are drawn."""
    workload = base.workload
    if workload.trace:
        return max(read_trace(workload.trace).prompts)
    return LONG * workload.prompt_tokens


def toml_of(config: Config, lines: Collection[str]) -> str:
    """As a file: what is not the default, under these lines of comment."""
    comment = "".join(f"# {line}\n" for line in lines)
    return f"{comment}\n{tomli_w.dumps(config.model_dump(mode='json', exclude_defaults=True))}"
