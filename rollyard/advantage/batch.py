"""Comparisons over the whole batch: `[groups][members]` rewards to as many advantages.

Each completion counts once, however long it is: `train.aggregation` says what its tokens count in the loss. (OpenRLHF and verl
take mean and std over tokens. Then a long answer moves the mean more than a short one, and a group with equal rewards is
not at 0 in the baseline variant.) A KL penalty is no part of the reward here.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.advantage.group import centred, divide, unit, whiten
from rollyard.config import AdvantageConfig


def reinforce(groups: Sequence[Sequence[float]], config: AdvantageConfig) -> list[list[float]]:
    """(r - mean of the batch) / (std of the batch + eps). Source: REINFORCE++, https://arxiv.org/abs/2501.03262, section 3."""
    return like(groups, whiten([reward for rewards in groups for reward in rewards], config))


def reinforce_baseline(groups: Sequence[Sequence[float]], config: AdvantageConfig) -> list[list[float]]:
    """a / (std of all a in the batch + eps), where a = r - mean of the group.

    The mean of all a is 0, so nothing is left to take off. A group with equal rewards is at exactly 0.0.
    Source: REINFORCE++ with baseline, https://arxiv.org/abs/2501.03262, section 3.
    """
    scale = unit([reward for rewards in groups for reward in rewards] or [1.0])
    values = []
    for rewards in groups:
        own, own_scale = centred(rewards)
        values += [value * (own_scale / scale) for value in own]
    return like(groups, divide(values, scale, config))


def like(groups: Sequence[Sequence[float]], values: Sequence[float]) -> list[list[float]]:
    """The values in groups of these sizes."""
    each = iter(values)
    return [[next(each) for _ in rewards] for rewards in groups]
