"""Causal attention over packed sequences, for training: differentiable, with little padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

# A bucket's shortest sequence has at least this share of its longest one's tokens.
LEAST_FULL = 0.75


class PackedAttention:
    """An `Attend` for sequences packed one after the other. Serves every layer of one forward pass.

    Sequences of similar length share a bucket, padded to its longest: one fused causal kernel call a bucket, and never
    a score between two sequences. Padding is at the end, so no real token attends to it; it repeats the sequence's last
    token, and its output is not read, so it gets no gradient.

    Args:
        lengths: tokens of each sequence, in packed order; each at least 1.
        device: where the flat batch lives.
    """

    __slots__ = ("_gather", "_restore", "_shapes", "_sizes")

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        counts = np.asarray(lengths, dtype=np.int64)
        if counts.size == 0 or counts.min() < 1:
            raise ValueError("packed sequences need at least one token each")
        starts = np.cumsum(counts) - counts
        gather: list[NDArray[np.int64]] = []
        restore = np.empty(int(counts.sum()), dtype=np.int64)
        self._shapes: list[tuple[int, int]] = []
        base = 0
        for members in buckets(counts):
            longest = int(counts[members].max())
            column = np.arange(longest)
            index = starts[members, None] + np.minimum(column, counts[members, None] - 1)
            real = column < counts[members, None]
            restore[index[real]] = base + np.flatnonzero(real)
            gather.append(index.ravel())
            self._shapes.append((len(members), longest))
            base += index.size
        self._sizes = [rows * longest for rows, longest in self._shapes]
        self._gather = torch.from_numpy(np.concatenate(gather)).to(device)
        self._restore = torch.from_numpy(restore).to(device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]` -> `[tokens, heads, head_dim]`."""
        padded = [torch.split(x.index_select(0, self._gather), self._sizes) for x in (q, k, v)]
        grouped = q.shape[1] != k.shape[1]
        out = []
        for shape, *parts in zip(self._shapes, *padded, strict=True):
            query, key, value = (part.view(*shape, *part.shape[1:]).transpose(1, 2) for part in parts)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            out.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(out).index_select(0, self._restore)


def buckets(lengths: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Indices of sequences of similar length: longest first, a bucket ends where one is below 3/4 of its longest."""
    order = np.argsort(-lengths, kind="stable")
    ranked = lengths[order]
    found, first = [], 0
    while first < len(order):
        # Ranked falls, so its negative rises: the first place that is too short for this bucket.
        end = int(np.searchsorted(-ranked, -LEAST_FULL * ranked[first], side="right"))
        found.append(order[first:end])
        first = end
    return found
