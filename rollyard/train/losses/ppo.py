"""PPO's clipped ratio, with a bound of its own on either side.

Per token, with ratio = exp(logprob now - logprob it is compared with):

    loss = -min(ratio x advantage, clip(ratio, 1 - low, 1 + high) x advantage)

Source: PPO, https://arxiv.org/abs/1707.06347, equation 7; with a group's advantages it is GRPO's. A `high` above `low` is
DAPO's clip-higher, https://arxiv.org/abs/2503.14476, equation 10: an unlikely token can gain more before it is clipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollyard.config import TrainConfig
from rollyard.train.correction import limited


def loss(new: Tensor, log_ratio: Tensor, advantages: Tensor, config: TrainConfig) -> Tensor:
    """All `[tokens]` float32; the gradient is in `log_ratio`."""
    ratio = limited(log_ratio).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped(log_ratio: Tensor, advantages: Tensor, config: TrainConfig) -> Tensor:
    """`[tokens]` bool: beyond the bound on the side where the minimum takes it, so without a gradient."""
    ratio = limited(log_ratio).exp()
    return torch.where(advantages > 0, ratio > 1 + config.clip_high, (advantages < 0) & (ratio < 1 - config.clip_low))
