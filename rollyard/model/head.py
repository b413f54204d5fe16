"""The head and the loss in one go: what training needs of `[tokens, vocab]` logits without ever holding them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rollyard.model.fused import product_dtype
from rollyard.model.kept import keep
from rollyard.types import Sampling

# Logits alive at a time when the caller does not say: 96 MiB of float32. Fewer make the products slower.
CHUNK_LOGITS = 24 << 20
# On a CPU the softmax of so many logits stays in its cache between one pass and the next.
CACHED_LOGITS = 3 << 18

Loss = Callable[[Tensor, slice], Tensor]


class HeadPass(NamedTuple):
    """What one pass through the head gave, of each target: `[n]` each, and `[n, hidden]`."""

    logprobs: Tensor  # float32
    entropy: Tensor  # float32, nats, of the distribution the target was drawn from
    missed: Tensor  # bool: the kept set had left the target out
    d_hidden: Tensor  # gradient of the loss, in hidden's dtype


@torch.no_grad()
def forward_backward(
    hidden: Tensor, weight: Tensor, targets: Tensor, loss: Loss, sampling: Sampling, chunk: int | None = None
) -> HeadPass:
    """Logprob of each target under the distribution it was sampled from, and the gradients of a loss of them.

    The distribution: logits / temperature, restricted to the kept set of top_k, then top_p, renormalised. A target
    outside this own kept set (the engine rounded differently) is added to it and flagged. The kept set itself gets no
    gradient. A chunk's logits are made once, become their own gradient in place, and are gone: d loss / d logits =
    d loss / d logprob x (one-hot(target) - probabilities). Softmax and loss are in float32, the products in autocast's
    format where it is on.

    Args:
        hidden: `[n, hidden]`, the states that predict the targets.
        weight: `[vocab, hidden]`, the head; the gradient is added to its `grad`, where it asks for one.
        targets: `[n]` int64.
        loss: told the logprobs of some targets, `[m]` with gradient, and which of all they are; gives what they add to
            the loss, a differentiable scalar.
        sampling: how the targets were drawn; of a greedy rollout there is no ratio to learn from.
        chunk: rows at a time at most (None: as many as 96 MiB of logits hold).

    Raises ValueError for a temperature of 0 or less.
    """
    if sampling.temperature <= 0:
        raise ValueError(f"logprobs of sampled tokens need a temperature above 0, not {sampling.temperature}")
    rows, vocab = hidden.shape[0], weight.shape[0]
    parts = chunks(rows, vocab, chunk)
    dtype = product_dtype(hidden)
    states, head = _states(hidden, sampling), weight.to(dtype)
    logprobs = hidden.new_empty(rows, dtype=torch.float32)
    found = HeadPass(logprobs, torch.empty_like(logprobs), hidden.new_zeros(rows, dtype=torch.bool), torch.empty_like(hidden))
    d_weight = _float32_gradient(weight) if weight.requires_grad else None
    # The same memory for each chunk: a CPU takes longer to get new memory than to fill it.
    logits = hidden.new_empty(parts[0].stop, vocab, dtype=torch.float32)
    for part in parts:
        d_logits = _into(logits[: part.stop - part.start], states[part], head)
        _to_gradient(d_logits, targets, part, loss, sampling, found)
        d_logits = d_logits.to(dtype)
        found.d_hidden[part] = d_logits @ head
        if d_weight is not None and dtype == torch.float32:
            d_weight.addmm_(d_logits.t(), states[part])
        elif d_weight is not None:
            d_weight += d_logits.t() @ states[part]  # summed over chunks in float32
    if sampling.temperature != 1.0:
        found.d_hidden.div_(sampling.temperature)
    if d_weight is not None and d_weight is not weight.grad:
        weight.grad = d_weight.to(weight.dtype) if weight.grad is None else weight.grad.add_(d_weight)
    return found


@torch.no_grad()
def logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, sampling: Sampling, chunk: int | None = None) -> Tensor:
    """The logprobs of `forward_backward`, to the bit, and nothing else: `[n]` float32."""
    if sampling.temperature <= 0:
        raise ValueError(f"logprobs of sampled tokens need a temperature above 0, not {sampling.temperature}")
    states, head = _states(hidden, sampling), weight.to(product_dtype(hidden))
    parts = chunks(hidden.shape[0], weight.shape[0], chunk)
    logits = hidden.new_empty(parts[0].stop, weight.shape[0], dtype=torch.float32)
    found = hidden.new_empty(hidden.shape[0], dtype=torch.float32)
    for part in parts:
        every = _into(logits[: part.stop - part.start], states[part], head)
        for some, here in _blocks(every, part):
            column = targets[here, None]
            if sampling.top_p < 1.0 or sampling.top_k:
                _restrict(some, column, sampling)
            found[here] = some.log_softmax(dim=-1).gather(1, column).squeeze(1)
    return found


def _states(hidden: Tensor, sampling: Sampling) -> Tensor:
    """In the products' format, divided by the temperature: few numbers instead of the many logits."""
    states = hidden.to(product_dtype(hidden))
    return states / sampling.temperature if sampling.temperature != 1.0 else states


def _blocks(logits: Tensor, part: slice) -> Iterator[tuple[Tensor, slice]]:
    """So many rows at a time that a CPU keeps them in its cache, and which of all they are. `logits` are those of `part`."""
    block = max(1, CACHED_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else logits.shape[0]
    for first in range(0, logits.shape[0], block):
        some = logits[first : first + block]
        yield some, slice(part.start + first, part.start + first + some.shape[0])


def chunks(rows: int, vocab: int, chunk: int | None = None) -> list[slice]:
    """The rows whose logits are made together: of one size, as a small chunk at the end is slow."""
    most = chunk or max(1, CHUNK_LOGITS // vocab)
    size = -(-rows // -(-rows // most))
    return [slice(first, min(first + size, rows)) for first in range(0, rows, size)]


def _float32_gradient(weight: Tensor) -> Tensor:
    """What the head's gradient is summed in: the weight's own where that is float32, else a new one."""
    if weight.grad is not None and weight.grad.dtype == torch.float32:
        return weight.grad
    return torch.zeros_like(weight, dtype=torch.float32)


def _into(out: Tensor, states: Tensor, head: Tensor) -> Tensor:
    """Logits, in `out` where the formats allow it."""
    if states.dtype == out.dtype:
        return torch.mm(states, head.t(), out=out)
    return out.copy_(states @ head.t())


def _to_gradient(logits: Tensor, targets: Tensor, part: slice, loss: Loss, sampling: Sampling, found: HeadPass) -> None:
    """Turn the logits of one chunk into d loss / d logits, and note what was found on the way."""
    for some, here in _blocks(logits, part):
        column = targets[here, None]
        if sampling.top_p < 1.0 or sampling.top_k:
            found.missed[here] = _restrict(some, column, sampling)
        every = some.log_softmax(dim=-1)
        torch.exp(every, out=some)
        logprobs = every.gather(1, column).squeeze(1)
        found.logprobs[here] = logprobs
        found.entropy[here] = every.mul_(some).sum(dim=-1).neg_()
        with torch.enable_grad():
            share = torch.autograd.grad(loss(logprobs.requires_grad_(), here), logprobs)[0].unsqueeze(1)
        some.mul_(-share).scatter_add_(1, column, share)


def _restrict(logits: Tensor, column: Tensor, sampling: Sampling) -> Tensor:
    """Push what lies outside the kept set and is no target so far down that its probability is 0. Returns which targets did."""
    rows = logits.shape[0]
    top_p = logits.new_full((rows,), sampling.top_p) if sampling.top_p < 1.0 else None
    top_k = column.new_full((rows,), sampling.top_k) if sampling.top_k else None
    kept = keep(logits, top_p, top_k)
    missed = kept.gather(1, column).isinf().squeeze(1)
    kept.scatter_(1, column, logits.gather(1, column))
    logits.copy_(kept.clamp_(min=-1e30))  # finite: 0 times it is 0
    return missed
