"""Forward and backward of one flat batch: the part that every kind of training shares."""

from __future__ import annotations

import torch

from rollyard.model.attention import packed_attention
from rollyard.model.head import HeadPass, Loss, forward_backward
from rollyard.model.transformer import CausalLM
from rollyard.train.rows import Rows
from rollyard.types import Sampling


def learn(model: CausalLM, rows: Rows, loss: Loss, sampling: Sampling, products: torch.dtype) -> HeadPass:
    """Add the gradients of a loss of the trained tokens' logprobs to the parameters'.

    The head makes its logits, the loss and their gradient chunk by chunk; then one backward pass through the body.

    Args:
        loss: of `[m]` logprobs and which of the trained tokens they are; called for some of them at a time.
        products: number format of matrix products, the parameters' own or a shorter one (autocast).
    """
    where = model.head_weight.device
    with torch.autocast(where.type, products, enabled=products != model.head_weight.dtype):
        hidden = model.hidden(rows.ids, rows.positions, packed_attention(rows.trees, where))
        predicting = hidden.detach().index_select(0, rows.predicting)
        found = forward_backward(predicting, model.head_weight, rows.targets, loss, sampling)
    hidden.backward(torch.zeros_like(hidden).index_add_(0, rows.predicting, found.d_hidden))
    return found
