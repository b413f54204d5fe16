"""The clipped policy gradient, and how it is averaged.

Per token, with ratio = exp(new - behaviour logprob):

    loss = -min(ratio x advantage, clip(ratio, 1 - low, 1 + high) x advantage)

Source: PPO, https://arxiv.org/abs/1707.06347, equation 7; with a group's advantages it is GRPO's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollyard.config import TrainConfig
from rollyard.types import TrainBatch


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over the trained tokens of one micro-batch, on the device."""

    loss: Tensor
    clipped: Tensor
    ratio: Tensor
    gap: Tensor
    gap_max: Tensor


@dataclass(frozen=True, slots=True)
class Denominators:
    """What sums over the whole batch are divided by, so that the split into micro-batches, or over ranks, changes nothing."""

    tokens: int  # trained tokens
    sequences: int  # rows with a trained token

    @classmethod
    def of(cls, batch: TrainBatch) -> Denominators:
        counts = [sum(sample.mask) for sample in batch.samples]
        return cls(sum(counts), sum(count > 0 for count in counts))

    def weight(self, tokens: int, config: TrainConfig, max_tokens: int) -> float:
        """What each of a row's `tokens` trained tokens counts.

        token: mean over all trained tokens. sequence: mean over sequences of their means. fixed: sum over
        sequences x max_tokens; source: Dr. GRPO, https://arxiv.org/abs/2503.20783.
        """
        if config.aggregation == "token":
            return 1 / self.tokens
        return 1 / (self.sequences * (tokens if config.aggregation == "sequence" else max_tokens))


def policy_loss(new: Tensor, behaviour: Tensor, advantages: Tensor, weights: Tensor, config: TrainConfig) -> Tensor:
    """A scalar. All `[trained tokens]`, float32: logprobs now, logprobs when sampled, advantages, what each token counts."""
    ratio = (new - behaviour).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -(torch.minimum(ratio * advantages, clipped * advantages) * weights).sum()


@torch.no_grad()
def token_sums(new: Tensor, behaviour: Tensor, advantages: Tensor, weights: Tensor, config: TrainConfig) -> TokenSums:
    """The loss and what is told about it, of the same tensors."""
    ratio, gap = (new - behaviour).exp(), (new - behaviour).abs()
    bound = torch.where(advantages > 0, ratio > 1 + config.clip_high, (advantages < 0) & (ratio < 1 - config.clip_low))
    loss = policy_loss(new, behaviour, advantages, weights, config)
    return TokenSums(loss, bound.sum(), ratio.sum(), gap.sum(), gap.max())
