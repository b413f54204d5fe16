"""The chunked head: what the trainer needs of `[tokens, vocab]` logits without ever holding them all."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from rollyard.model.kept import keep

# Logits alive at a time when the caller does not say: 64 MiB of float32.
CHUNK_LOGITS = 1 << 24


class _Drawn(NamedTuple):
    """How tokens were drawn."""

    temperature: float
    top_p: float
    top_k: int
    chunk: int


def sampled_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    top_p: float = 1.0,
    top_k: int = 0,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of each target under the distribution it was sampled from, and that distribution's entropy.

    The distribution: logits / temperature, restricted to the kept set of top_k, then top_p, renormalised. A target
    outside this own kept set (the engine rounded differently) is added to it and flagged. The kept set itself gets no
    gradient. Logits are computed in chunks of rows, and again in the backward pass; log-softmax is in float32.

    Args:
        hidden: `[n, hidden]`, the states that predict the targets.
        weight: `[vocab, hidden]`, the head.
        targets: `[n]` int64.
        temperature: above 0; a greedy rollout has no ratio to learn from.
        chunk: rows at a time (None: as many as 64 MiB of logits hold).

    Returns:
        logprobs `[n]` float32, differentiable in hidden and weight; entropy `[n]` float32 in nats; missed `[n]` bool.

    Raises ValueError for a temperature of 0 or less.
    """
    if temperature <= 0:
        raise ValueError(f"logprobs of sampled tokens need a temperature above 0, not {temperature}")
    drawn = _Drawn(temperature, top_p, top_k, chunk or max(1, CHUNK_LOGITS // weight.shape[0]))
    logprobs, entropy, missed = _Head.apply(hidden, weight, targets, drawn)  # type: ignore[no-untyped-call]
    return logprobs, entropy, missed


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, drawn: _Drawn) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(hidden, weight, targets)
        ctx.drawn = drawn
        rows = hidden.shape[0]
        logprobs = hidden.new_empty(rows, dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        missed = hidden.new_empty(rows, dtype=torch.bool)
        for part in _chunks(rows, drawn.chunk):
            kept, missed[part] = _kept_logits(hidden[part], weight, targets[part], drawn)
            every = kept.log_softmax(dim=-1)
            logprobs[part] = every.gather(1, targets[part, None]).squeeze(1)
            entropy[part] = torch.special.entr(every.exp()).sum(dim=-1)
        ctx.mark_non_differentiable(entropy, missed)
        return logprobs, entropy, missed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """d logprob / d logits = (one-hot(target) - probabilities) / temperature."""
        hidden, weight, targets = ctx.saved_tensors
        for_hidden, for_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.empty_like(hidden) if for_hidden else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
        for part in _chunks(hidden.shape[0], ctx.drawn.chunk):
            kept, _missed = _kept_logits(hidden[part], weight, targets[part], ctx.drawn)
            share = gradient[part, None] / ctx.drawn.temperature
            d_logits = kept.softmax(dim=-1).mul_(-share).scatter_add_(1, targets[part, None], share).to(weight.dtype)
            if d_hidden is not None:
                torch.mm(d_logits, weight, out=d_hidden[part])
            if d_weight is not None and weight.dtype == torch.float32:
                d_weight.addmm_(d_logits.t(), hidden[part])
            elif d_weight is not None:
                d_weight += d_logits.t() @ hidden[part]  # summed over chunks in float32
        return d_hidden, None if d_weight is None else d_weight.to(weight.dtype), None, None


def _chunks(rows: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, rows)) for first in range(0, rows, chunk)]


def _kept_logits(hidden: Tensor, weight: Tensor, targets: Tensor, drawn: _Drawn) -> tuple[Tensor, Tensor]:
    """`[rows, vocab]` float32 logits with -inf outside the kept set and the target, and which targets it had left out."""
    logits = F.linear(hidden, weight).float()
    if drawn.temperature != 1.0:
        logits = logits / drawn.temperature
    rows = logits.shape[0]
    top_p = logits.new_full((rows,), drawn.top_p) if drawn.top_p < 1.0 else None
    top_k = targets.new_full((rows,), drawn.top_k) if drawn.top_k else None
    kept = keep(logits, top_p, top_k)
    column = targets[:, None]
    missed = kept.gather(1, column).isinf().squeeze(1)
    if kept is not logits:
        kept.scatter_(1, column, logits.gather(1, column))
    return kept, missed
