"""The value head: what the policy can expect before each token it writes, read off its own hidden states.

    value = weight x hidden + bias,    loss = max((value - return)^2, (clip(value, old +- clip) - return)^2) / 2

`old` is the value before this batch was trained on. Source: PPO's reference code (the clipped value loss of `ppo2`,
https://github.com/openai/baselines); the head is float32 and begins with zeros.

The head learns from hidden states as they are: no gradient goes on into the policy's body, which so learns what it would learn
from the advantages alone. With `train.value_body` c it does, c times the value loss beside the policy's. The head is no part of
the policy: engines never get it, and checkpoints have it in the trainer's own file.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollyard.config import TrainConfig
from rollyard.train.ranks import Ranks


class ValueHead:
    """One linear unit on the last hidden states.

    Args:
        width: of the hidden states.
        device: where they are.
    """

    def __init__(self, width: int, device: torch.device, config: TrainConfig) -> None:
        self._config = config
        self.parameters = {
            "value_head.weight": nn.Parameter(torch.zeros(1, width, device=device)),
            "value_head.bias": nn.Parameter(torch.zeros(1, device=device)),
        }

    def values(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` -> `[n]` float32, whatever the policy's products are computed in."""
        with torch.autocast(hidden.device.type, enabled=False):
            return F.linear(hidden.float(), *self.parameters.values()).squeeze(1)

    @torch.enable_grad()
    def learn(self, hidden: Tensor, old: Tensor, returns: Tensor, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add the gradient of the loss of some tokens to the head's.

        Args:
            hidden: `[n, hidden]`, of what predicts each token.
            old, returns, weights: `[n]` float32; `weights` is what each token counts.

        Returns the loss, and the gradient for `hidden` where the body is to learn too.
        """
        states = hidden.detach().float().requires_grad_(self._config.value_body > 0)
        values = self.values(states)
        near = old + (values - old).clamp(-self._config.value_clip, self._config.value_clip)
        loss = (torch.maximum((values - returns).square(), (near - returns).square()) * weights).sum() / 2
        loss.backward()
        return loss.detach(), None if states.grad is None else (states.grad * self._config.value_body).to(hidden.dtype)

    def add_up(self, ranks: Ranks) -> None:
        """Its gradients of all ranks, which need not have had a pass."""
        every = list(self.parameters.values())
        flat = torch.cat([(torch.zeros_like(each) if each.grad is None else each.grad).flatten() for each in every])
        ranks.add_up(flat)
        for each, part in zip(every, flat.split([each.numel() for each in every]), strict=True):
            each.grad = part.view_as(each)

    def clip(self, most: float) -> float:
        """By itself: how steep the value loss is says nothing about the policy. Returns the norm before."""
        return float(nn.utils.clip_grad_norm_(list(self.parameters.values()), most))
