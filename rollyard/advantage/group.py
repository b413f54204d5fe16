"""Comparisons within a group: `[members]` rewards of one prompt, at least one, to as many advantages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rollyard.config import AdvantageConfig
from rollyard.errors import TrainError
from rollyard.types import LARGEST


def grpo(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """(r - mean) / (std + eps). Source: DeepSeekMath, https://arxiv.org/abs/2402.03300, section 4.1."""
    return whiten(rewards, config)


def dr_grpo(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """r - mean. Source: Understanding R1-Zero-Like Training, https://arxiv.org/abs/2503.20783, section 3.2."""
    values, scale = centred(rewards)
    return [value * scale for value in values]


def rloo(rewards: Sequence[float], config: AdvantageConfig) -> list[float]:
    """r_i - mean of the others, which is (r_i - mean) n / (n - 1).

    Source: Back to Basics, https://arxiv.org/abs/2402.14740, section 3.2.
    """
    values, scale = centred(rewards)
    others = max(1, len(rewards) - 1)  # alone: 0 all the same
    return [value * (len(rewards) / others) * scale for value in values]


def whiten(numbers: Sequence[float], config: AdvantageConfig) -> list[float]:
    """(x - mean) / (std + eps), with the kind of std that is asked for. All equal: exactly 0.0."""
    values, scale = centred(numbers)
    return divide(values, scale, config)


def divide(values: Sequence[float], scale: float, config: AdvantageConfig) -> list[float]:
    """x / (std + eps) of numbers x = value x scale whose mean is 0.

    Args:
        scale: a power of two that makes the largest value about 1, so that no square overflows.
    """
    if config.std == "none":
        return [value * scale for value in values]
    freedom = max(1, len(values) - (config.std == "sample"))
    std = math.sqrt(math.fsum(value * value for value in values) / freedom)
    return [value / (std + config.eps / scale) for value in values]


def check_range(numbers: Iterable[float]) -> None:
    """Raises TrainError for the first that float32, which losses are computed in, does not hold."""
    beyond = next((number for number in numbers if not abs(number) <= LARGEST), None)
    if beyond is not None:
        raise TrainError(f"an advantage of {beyond:g} is no finite float32 number: use smaller rewards")


def centred(numbers: Sequence[float]) -> tuple[list[float], float]:
    """x - mean, in units of a power of two, and that unit. All equal: exactly 0.0."""
    if len(set(numbers)) < 2:
        return [0.0] * len(numbers), 1.0
    scale = unit(numbers)
    mean = math.fsum(number / scale for number in numbers) / len(numbers)
    return [number / scale - mean for number in numbers], scale


def unit(numbers: Sequence[float]) -> float:
    """The largest power of two that is not above any but 0 of them in size: dividing by it is exact."""
    return math.ldexp(1.0, math.frexp(max(map(abs, numbers)))[1] - 1)
