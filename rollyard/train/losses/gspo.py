"""GSPO: one ratio for all tokens of a row, the geometric mean of theirs.

With s = exp(mean over the row's trained tokens of logprob now - logprob it is compared with):

    loss = -min(s x advantage, clip(s, 1 - low, 1 + high) x advantage)

Source: GSPO, https://arxiv.org/abs/2507.18071, equations 5 to 7; the mean over rows is `train.aggregation sequence`. What is
computed is its token form (GSPO-token, equations 13 and 14): s is known before and has no gradient, and each token has the
ratio s x p / sg(p), which is s in value. The gradient, s x advantage x that of the token's logprob, is the row's own:
d s = s x mean of d logprob. The paper clips at 3e-4 and 4e-4, for a mean moves far less than a token.
"""

from __future__ import annotations

from torch import Tensor

from rollyard.config import TrainConfig
from rollyard.train.losses import ppo


def loss(new: Tensor, log_ratio: Tensor, advantages: Tensor, config: TrainConfig) -> Tensor:
    """All `[tokens]` float32; `log_ratio` is the row's at each of its tokens, the gradient is in `new`."""
    return ppo.loss(new, log_ratio + (new - new.detach()), advantages, config)
