"""What is to be known of training as a scenario has it, beside what our own trainer does."""

from __future__ import annotations

from collections.abc import Collection

from rollyard.errors import ConfigError
from rollyard.plan.costs import MOMENTS, longest_of, sizes_of
from rollyard.plan.devices import Devices
from rollyard.plan.hardware import CPU
from rollyard.plan.memory import training
from rollyard.plan.scenario import Scenario
from rollyard.plan.shape import Shape
from rollyard.plan.space import with_options


def cautions(scenario: Scenario, shape: Shape, devices: Devices, said: Collection[str] = ()) -> list[str]:
    """A line each. Of another stack's trainer (`train.adapter`) nothing is known.

    Args:
        said: options by which somebody says that training is another's; that is not told again.
    """
    if scenario.train.adapter:
        return []
    found = [_formats(scenario)]
    if "costs.state_bytes" not in said:
        found.append(_state(scenario, shape))
    if "costs.recompute" not in said:
        found.append(_memory(scenario, shape, devices))
    return [line for line in found if line]


def _formats(scenario: Scenario) -> str:
    """docs/weights.md has how few numbers of such a policy a step changes."""
    if scenario.model.dtype == "float32" or scenario.weights.what == "lora" or scenario.costs.state_bytes:
        return ""
    told = "parameters and AdamW's moments are bfloat16, with no finer copy: what a step changes by less than 1/512 of itself "
    told += "stays as it was, which at RL's learning rates is nearly everything"
    return f"{told}; --model.dtype float32 with --train.precision bfloat16 multiplies as fast, and keeps such changes"


def _state(scenario: Scenario, shape: Shape) -> str:
    if not scenario.costs.state_bytes or scenario.weights.what == "lora":
        return ""
    own = (1 + MOMENTS) * sizes_of(scenario, shape).train
    if scenario.costs.state_bytes == own:
        return ""
    told = f"training keeps {scenario.costs.state_bytes:g} bytes of a parameter besides itself (costs.state_bytes)"
    return f"{told}, and our own trainer {own}: no option of a run changes that"


def _memory(scenario: Scenario, shape: Shape, devices: Devices) -> str:
    """Our own trainer keeps all activations of a micro-batch unless it is told otherwise, and a copy of what it broadcasts."""
    if scenario.cluster.hardware == CPU:
        return ""
    own = with_options(scenario, {"costs.recompute": False, "costs.sent_copy": True})
    try:
        training(own, shape, devices, sizes_of(own, shape), longest_of(own, shape))
    except ConfigError as error:
        kept = ["a copy of what it broadcasts"] * bool(sizes_of(own, shape).sent)
        kept += ["activations, without train.recompute"] * (not own.recomputes)
        return f"our own trainer keeps {' and '.join(kept) or 'more than that'}: {error.problem}"
    return ""
