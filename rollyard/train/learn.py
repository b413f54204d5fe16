"""Forward and backward of one flat batch: the part that every kind of training shares."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rollyard.model.attention import packed_attention
from rollyard.model.head import HeadPass, Loss, forward_backward, logprobs
from rollyard.model.transformer import CausalLM
from rollyard.train.rows import Rows
from rollyard.types import Sampling


def learn(
    model: CausalLM,
    rows: Rows,
    loss: Loss,
    sampling: Sampling,
    products: torch.dtype,
    *,
    before: Callable[[Tensor], None] | None = None,
    beside: Callable[[Tensor], Tensor | None] | None = None,
) -> HeadPass:
    """Add the gradients of a loss of the trained tokens' logprobs to the parameters'.

    The head makes its logits, the loss and their gradient chunk by chunk; then one backward pass through the body.

    Args:
        loss: of `[m]` logprobs and which of the trained tokens they are; called for some of them at a time.
        products: number format of matrix products, the parameters' own or a shorter one (autocast).
        before: told the logprobs of all of them, before `loss` is called for the first time: one more pass through the head.
        beside: told the hidden states that predict them, `[trained, hidden]`; gives a gradient of those that is added.
    """
    where = model.head_weight.device
    with torch.autocast(where.type, products, enabled=products != model.head_weight.dtype):
        hidden = model.hidden(rows.ids, rows.positions, packed_attention(rows.trees, where))
        predicting = hidden.detach().index_select(0, rows.predicting)
        if before is not None:
            before(logprobs(predicting, model.head_weight, rows.targets, sampling))
        found = forward_backward(predicting, model.head_weight, rows.targets, loss, sampling)
    more = None if beside is None else beside(predicting)
    gradient = found.d_hidden if more is None else found.d_hidden + more
    hidden.backward(torch.zeros_like(hidden).index_add_(0, rows.predicting, gradient))
    return found


@torch.no_grad()
def look(model: CausalLM, rows: Rows, products: torch.dtype, read: Callable[[Tensor], Tensor]) -> Tensor:
    """What `read` makes of the hidden states that predict the trained tokens, `[trained, hidden]`. No gradient."""
    where = model.head_weight.device
    with torch.autocast(where.type, products, enabled=products != model.head_weight.dtype):
        hidden = model.hidden(rows.ids, rows.positions, packed_attention(rows.trees, where))
        found = read(hidden.index_select(0, rows.predicting))
    model.parts.rest()
    return found


def policy_logprobs(model: CausalLM, rows: Rows, sampling: Sampling, products: torch.dtype) -> Tensor:
    """The logprobs of the trained tokens, `[trained]` float32, as `learn` has them. No gradient."""
    return look(model, rows, products, lambda states: logprobs(states, model.head_weight, rows.targets, sampling))
