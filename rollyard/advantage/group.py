"""Advantages of a group: how much better each completion of one prompt was than its siblings.

Arithmetic is float64. A member without a verdict (None, NaN, infinite) is no zero: it takes no part in mean or
standard deviation and gets no advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rollyard.config import AdvantageConfig
from rollyard.types import Group


def advantages(group: Group, config: AdvantageConfig) -> tuple[float | None, ...]:
    """One number for each of `group.rollouts`, None where there is no verdict.

    Rewards that are all equal, or a single verdict, give exactly 0.0, whatever the rounding of a mean would say.
    """
    verdicts = [value if value is not None and math.isfinite(value) else None for value in group.rewards]
    scored = [value for value in verdicts if value is not None]
    if len(set(scored)) < 2:
        return tuple(None if value is None else 0.0 for value in verdicts)
    compared = iter(KINDS[config.kind](scored, config))
    return tuple(None if value is None else next(compared) for value in verdicts)


def grpo(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """(r - mean) / (std + eps). Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1."""
    centred = dr_grpo(rewards, config)
    if config.std == "none":
        return centred
    freedom = len(rewards) - (config.std == "sample")
    std = math.hypot(*centred) / math.sqrt(freedom)  # hypot scales first: no square of a large reward overflows
    return [value / (std + config.eps) for value in centred]


def dr_grpo(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """r - mean. Source: Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783, section 3.2."""
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def rloo(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """r_i - mean of the others. Source: Back to Basics, https://arxiv.org/abs/2402.14740, section 3.2."""
    total = math.fsum(rewards)
    return [reward - (total - reward) / (len(rewards) - 1) for reward in rewards]


KINDS: dict[str, Callable[[Sequence[float], AdvantageConfig], list[float]]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}
