"""Draws tokens. The noise of a token belongs to (request seed, its index in the completion), whatever the batch.

One uniform number a token and the inverse of the cumulative distribution, in two levels: a float64 running sum of whole
blocks of the vocabulary finds the block, another one inside it finds the token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rollyard.model.kept import keep
from rollyard.types import Sampling

BLOCK = 256  # vocabulary entries of one block
NEAR_EDGE = 1e-6  # share of probability: a draw this close to the border between two tokens could flip by rounding
NEAR_LOGIT = 1e-5  # two best logits this close could change places
GAMMA = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token for each row."""

    token_ids: list[int]  # [rows]
    logprobs: list[float]  # [rows], under the distribution each was drawn from; at temperature 0 that of temperature 1
    near_ties: int


def uniform(seeds: Sequence[int], indices: Sequence[int]) -> NDArray[np.float64]:
    """`[rows]` in [0, 1): one number for each (64-bit seed, token index).

    Source: the SplitMix64 generator of Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    stream = _mix(np.array(seeds, np.uint64))
    step = (np.array(indices, np.uint64) + np.uint64(1)) * np.uint64(GAMMA)
    return (_mix(stream + step) >> np.uint64(11)).astype(np.float64) * 2.0**-53


# logits `[rows, vocab]` and noise `[rows]` float64 in [0, 1) -> tokens `[rows]` int64, logprobs `[rows]` float64, and near
# ties `[rows]` bool: draws so close to the border between two tokens that rounding could flip them.
Choose = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def draw(
    logits: Tensor, sampling: Sequence[Sampling], seeds: Sequence[int], indices: Sequence[int], choose: Choose | None = None
) -> Drawn:
    """Draw the next token of each row.

    Args:
        logits: `[rows, vocab]` float32.
        sampling: `[rows]`, temperature, top_p and top_k.
        seeds: `[rows]`, the requests' seeds.
        indices: `[rows]`, the index in its completion of the token to draw.
        choose: draws from shaped logits; `by_inverse_cdf` when None.
    """
    temperatures = np.array([each.temperature for each in sampling], np.float32)
    greedy = temperatures == 0.0
    shaped = _shape(logits, temperatures, greedy, sampling)
    noise = torch.from_numpy(uniform(seeds, indices)).to(logits.device)
    tokens, logprobs, near = (choose or by_inverse_cdf)(shaped, noise)
    if greedy.any():
        likeliest, tied = _likeliest(logits)
        chosen = torch.from_numpy(greedy).to(logits.device)
        tokens, near = torch.where(chosen, likeliest, tokens), torch.where(chosen, tied, near)
        every = logits.double().log_softmax(-1).gather(1, likeliest[:, None])[:, 0]
        logprobs = torch.where(chosen, every, logprobs)
    return Drawn(tokens.tolist(), logprobs.tolist(), int(near.sum()))


def by_inverse_cdf(shaped: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A `Choose` in torch, on any device."""
    best = shaped.amax(-1, keepdim=True)
    tokens, near, total = inverse_cdf((shaped - best).exp_(), noise)
    return tokens, (shaped.gather(1, tokens[:, None]) - best)[:, 0].double() - total.log(), near


def inverse_cdf(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first token whose cumulative share exceeds `noise`, and whether it was close. Never a token of weight 0.

    Args:
        weights: `[rows, vocab]`, probabilities times any constant of the row.
        noise: `[rows]` float64 in [0, 1).

    Returns:
        tokens `[rows]` int64, near ties `[rows]` bool, sums of the weights `[rows]` float64.
    """
    rows, vocab = weights.shape
    block = min(BLOCK, vocab)
    if vocab % block:
        weights = F.pad(weights, (0, -vocab % block))
    blocks = weights.view(rows, -1, block)
    # Within a block float32 will do: 256 terms, and a float64 sum here costs as much as the rest of the draw.
    ends = blocks.sum(-1).cumsum(-1, dtype=torch.float64)  # [rows, blocks]
    total = ends[:, -1:]
    target = noise[:, None] * total
    index = _first_beyond(ends, target)
    before = torch.where(index > 0, ends.gather(1, (index - 1).clamp(min=0)), 0.0)
    inside = blocks[torch.arange(rows, device=blocks.device), index[:, 0]].double().cumsum(-1)  # [rows, block]
    rest = target - before
    within = _first_beyond(inside, rest)
    edges = torch.cat((torch.zeros_like(rest), inside), dim=1)
    distance = torch.minimum(rest - edges.gather(1, within), edges.gather(1, within + 1) - rest)
    return (index * block + within)[:, 0], (distance < NEAR_EDGE * total)[:, 0], total[:, 0]


def _first_beyond(ends: Tensor, target: Tensor) -> Tensor:
    """`[rows, 1]`: the first place whose running sum exceeds the target, or else the last one that adds to the sum."""
    last = (ends < ends[:, -1:]).sum(-1, keepdim=True)
    return torch.minimum((ends <= target).sum(-1, keepdim=True), last)


def _shape(logits: Tensor, temperatures: NDArray[np.float32], greedy: NDArray[np.bool_], sampling: Sequence[Sampling]) -> Tensor:
    """Logits over temperature, -inf outside the kept set; greedy rows as they are."""
    if (temperatures != 1.0).any():
        divisor = torch.from_numpy(np.where(greedy, np.float32(1.0), temperatures)).to(logits.device)
        logits = logits / divisor[:, None]
    cut = [row for row, each in enumerate(sampling) if each.temperature and (each.top_p < 1.0 or each.top_k)]
    if not cut:
        return logits
    rows = torch.tensor(cut, device=logits.device)
    top_p = torch.tensor([sampling[row].top_p for row in cut], device=logits.device)
    top_k = torch.tensor([sampling[row].top_k for row in cut], device=logits.device)
    return logits.index_copy(0, rows, keep(logits.index_select(0, rows), top_p, top_k))


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, tokens = logits.topk(min(2, logits.shape[1]), dim=-1)
    return tokens[:, 0], best[:, 0] - best[:, -1] < NEAR_LOGIT


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
