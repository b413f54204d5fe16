"""What a token weighs in the loss, where those who sampled it gave it another probability than the trainer did.

With w = exp(trainer's logprob before this batch - logprob when sampled):

    truncate: min(w, cap)
    mask:     w, and 0 outside [floor, cap]

The weight has no gradient. It stands for two things at once: an engine that computes a little differently, and an engine that
had older weights. Sources: truncated importance sampling for the first, https://fengyao.notion.site/off-policy-rl; masked, as
IcePop, https://arxiv.org/abs/2510.18855; apart from the ratio that is clipped, as AReaL's decoupled PPO,
https://arxiv.org/abs/2505.24298. At the level `sequence` w is the product over a row's tokens, which is the row's
own importance ratio; a long row's is soon near 0 or very large.
"""

from __future__ import annotations

from torch import Tensor

from rollyard.config import TrainConfig

LIMIT = 20.0  # nats: a ratio of 5e8. What is above it counts as that, and has no gradient; float32 ends at 88.


def limited(log_ratio: Tensor) -> Tensor:
    """So that exp of it is a number."""
    return log_ratio.clamp(max=LIMIT)


def importance(log_ratio: Tensor, config: TrainConfig) -> Tensor:
    """`[tokens]` -> what each of them weighs, float32."""
    ratio = limited(log_ratio).exp()
    if config.correction == "truncate":
        return ratio.clamp(max=config.correction_cap)
    return ratio.masked_fill((ratio > config.correction_cap) | (ratio < config.correction_floor), 0.0)


def cut(log_ratio: Tensor, config: TrainConfig) -> Tensor:
    """`[tokens]` bool: whose weight is not its ratio."""
    ratio = limited(log_ratio).exp()
    above = (ratio > config.correction_cap) | (log_ratio > LIMIT)
    return above | (ratio < config.correction_floor) if config.correction == "mask" else above
