"""CISPO: the ratio, clipped and without a gradient, weighs the logprob. No token loses its gradient.

    loss = -sg(clip(ratio, 1 - low, 1 + high)) x advantage x logprob now

Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5. There is no lower bound there (`clip_low` 1), and the
mean is over all tokens (`train.aggregation token`).
"""

from __future__ import annotations

from torch import Tensor

from rollyard.config import TrainConfig
from rollyard.train.correction import limited


def loss(new: Tensor, log_ratio: Tensor, advantages: Tensor, config: TrainConfig) -> Tensor:
    """All `[tokens]` float32; the gradient is in `new`."""
    weight = limited(log_ratio.detach()).exp().clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * advantages * new


def clipped(log_ratio: Tensor, advantages: Tensor, config: TrainConfig) -> Tensor:
    """`[tokens]` bool: whose weight was, on either side; nothing is where there is no advantage."""
    ratio = limited(log_ratio).exp()
    return (advantages != 0) & ((ratio > 1 + config.clip_high) | (ratio < 1 - config.clip_low))
