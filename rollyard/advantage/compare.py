"""Advantages of a batch: how much better each completion is than what it is compared with.

Arithmetic is float64, whatever kind of number a reward is. A member without a verdict (None, NaN, infinite) is no zero: it
takes no part in mean or standard deviation and gets no advantage. An advantage that float32 cannot hold is an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rollyard.advantage.batch import reinforce, reinforce_baseline
from rollyard.advantage.group import check_range, dr_grpo, grpo, rloo
from rollyard.advantage.token import outcomes
from rollyard.config import AdvantageConfig
from rollyard.types import Group

Rewards = Sequence[Sequence[float]]  # [groups][members with a verdict]
Kind = Callable[[Rewards, AdvantageConfig], list[list[float]]]


def within(kind: Callable[[Sequence[float], AdvantageConfig], list[float]]) -> Kind:
    """Each group by itself."""
    return lambda groups, config: [kind(rewards, config) for rewards in groups]


KINDS: dict[str, Kind] = {
    "grpo": within(grpo),
    "dr_grpo": within(dr_grpo),
    "rloo": within(rloo),
    "reinforce++": reinforce,
    "reinforce++_baseline": reinforce_baseline,
    "gae": outcomes,
}


def compare(groups: Sequence[Group], config: AdvantageConfig) -> list[tuple[float | None, ...]]:
    """`[groups][rollouts]`: an advantage for each rollout, None where there is nothing to train on.

    What belongs together is found by prompt id. Rewards that are all equal, or a single verdict, give exactly 0.0, whatever
    the rounding of a mean would say. With `gae` the numbers are the rewards themselves, see `rollyard.advantage.token`.

    With `overlong = "mask"` a completion that was cut by max_tokens or by the window is compared like any other, so that it
    counts in its group's mean, and then not trained on. Source: DAPO, https://arxiv.org/abs/2503.14476, section 3.4.

    Raises TrainError for an advantage beyond float32.
    """
    places: dict[int, list[tuple[int, int]]] = {}
    rewards: dict[int, list[float]] = {}
    for at, group in enumerate(groups):
        for member, value in enumerate(group.rewards):
            if value is not None and math.isfinite(value):
                places.setdefault(group.id, []).append((at, member))
                rewards.setdefault(group.id, []).append(float(value))
    found: list[list[float | None]] = [[None] * len(group.rollouts) for group in groups]
    judged = KINDS[config.kind](list(rewards.values()), config)
    check_range(value for values in judged for value in values)
    for id_, values in zip(rewards, judged, strict=True):
        for (at, member), value in zip(places[id_], values, strict=True):
            if not (config.overlong == "mask" and groups[at].rollouts[member].completion.finish.truncated):
                found[at][member] = value
    return [tuple(values) for values in found]
