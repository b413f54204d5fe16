"""Token by token, against what a value head expected: GAE.

The reward of a completion is at its last token, 0 before. Nothing follows that, also where the completion was cut by a limit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rollyard.advantage.group import check_range, whiten
from rollyard.config import AdvantageConfig
from rollyard.errors import TrainError
from rollyard.types import Sample, TrainBatch

Values = Sequence[Sequence[Sequence[float]]]  # [shards][samples][trained tokens], see `protocols.ValueTrainer`


def gae(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """`[tokens]` rewards and values of one row to as many advantages.

        delta_t = r_t + gamma V_(t+1) - V_t,    A_t = delta_t + gamma lambda A_(t+1),    both 0 after the last token

    Source: High-Dimensional Continuous Control Using Generalized Advantage Estimation, https://arxiv.org/abs/1506.02438,
    equations 11, 12 and 16.
    """
    found = [0.0] * len(rewards)
    later = following = 0.0
    for at in reversed(range(len(rewards))):
        later = rewards[at] + gamma * following - values[at] + gamma * lam * later
        following = values[at]
        found[at] = later
    return found


def outcomes(groups: Sequence[Sequence[float]], config: AdvantageConfig) -> list[list[float]]:
    """The rewards as they are: `spread` makes advantages of them once there are values."""
    return [list(rewards) for rewards in groups]


def spread(shards: Sequence[TrainBatch], values: Values, config: AdvantageConfig) -> tuple[TrainBatch, ...]:
    """The batch with advantages by `gae` in place of rewards, whitened over its trained tokens, with `values` and `returns`.

    A return is what the value head is to expect: the advantage before whitening, plus the value. Each row of an episode has
    the whole reward at its own last trained token.

    Args:
        shards: whose samples have the reward in place of the advantage, on every trained token.
        values: of the same samples.

    Raises TrainError when a value is not finite, and for an advantage beyond float32.
    """
    if not all(math.isfinite(value) for own in values for row in own for value in row):
        raise TrainError("the value head expects what is not finite")
    rows = [
        (row, gae(_rewards(sample), row, config.gamma, config.lam))
        for batch, own in zip(shards, values, strict=True)
        for sample, row in zip(batch.samples, own, strict=True)
    ]
    whitened = whiten([advantage for _, found in rows for advantage in found], config)
    check_range(whitened)
    each, white = iter(rows), iter(whitened)

    def filled(micro: Sequence[Sample]) -> tuple[Sample, ...]:
        return tuple(_filled(sample, *next(each), white) for sample in micro)

    return tuple(replace(batch, micro_batches=tuple(map(filled, batch.micro_batches))) for batch in shards)


def _rewards(sample: Sample) -> list[float]:
    """`[trained tokens]`"""
    rewards = [reward for reward, trained in zip(sample.advantages, sample.mask, strict=True) if trained]
    return [0.0] * (len(rewards) - 1) + rewards[-1:]


def _filled(sample: Sample, values: Sequence[float], advantages: Sequence[float], white: Iterator[float]) -> Sample:
    returns = [value + advantage for value, advantage in zip(values, advantages, strict=True)]
    return replace(
        sample,
        advantages=_placed(sample, [next(white) for _ in advantages]),
        values=_placed(sample, values),
        returns=_placed(sample, returns),
    )


def _placed(sample: Sample, numbers: Sequence[float]) -> tuple[float, ...]:
    """`[trained tokens]` to `[tokens]`, 0 where nothing is trained."""
    each = iter(numbers)
    return tuple(next(each) if trained else 0.0 for trained in sample.mask)
