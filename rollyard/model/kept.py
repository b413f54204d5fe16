"""The kept set of nucleus and top-k sampling. Engine and trainer use this one, so that they agree."""

from __future__ import annotations

import torch
from torch import Tensor


def keep(logits: Tensor, top_p: Tensor | None, top_k: Tensor | None) -> Tensor:
    """Logits with -inf outside the kept set: first the `top_k` likeliest, then the fewest of those that hold `top_p`.

    `top_p` is a share of what `top_k` left. The likeliest token is always kept; among equals the lower id goes first.

    Args:
        logits: `[rows, vocab]` float32, already divided by the temperature.
        top_p: `[rows]` in (0, 1], 1 keeps all; None keeps all in every row.
        top_k: `[rows]` int64, 0 keeps all; None keeps all in every row.

    Returns:
        `[rows, vocab]`, a new tensor (the input when nothing can be left out).
    """
    if top_p is None and top_k is None:
        return logits
    ranked, order = logits.sort(dim=-1, descending=True, stable=True)
    out = torch.zeros_like(ranked, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(logits.shape[-1], device=logits.device)
        out |= (rank >= top_k[:, None]) & (top_k[:, None] > 0)
    if top_p is not None:
        probabilities = ranked.masked_fill(out, -torch.inf).softmax(dim=-1)
        # What the likelier ones hold already: exactly 0 for the likeliest. Rows at 1 keep all, for a rounded sum may
        # reach 1 before the last token.
        before = probabilities.cumsum(dim=-1) - probabilities
        out |= (before >= top_p[:, None]) & (top_p[:, None] < 1)
    return logits.masked_fill(torch.zeros_like(out).scatter_(-1, order, out), -torch.inf)
