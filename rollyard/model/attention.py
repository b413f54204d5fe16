"""Causal attention over packed sequences, for training: differentiable, with little padding, a shared prompt only once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rollyard.model.transformer import Attend

Index = NDArray[np.int64]

# A bucket's shortest sequence has at least this share of its longest one's tokens.
LEAST_FULL = 0.75

_FLASH = "_scaled_dot_product_flash_attention_for_cpu"
# The operator under torch's own attention on CPU. Called directly it also gives the log-sum-exp of each row, without
# which two parts of one softmax cannot be joined.
HAS_FLASH = hasattr(torch.ops.aten, _FLASH) and hasattr(torch.ops.aten, f"{_FLASH}_backward")


@dataclass(frozen=True, slots=True)
class Tree:
    """Tokens of one trunk, and of each branch that continues it. They lie one after the other in the flat batch.

    Example: a prompt of 5 tokens with completions of 3 and 2 is Tree(5, (3, 2)), a sequence by itself Tree(7).
    """

    trunk: int
    branches: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.trunk + sum(self.branches)


def packed_attention(trees: Sequence[Tree], device: torch.device | str = "cpu") -> Attend:
    """Attention in which each token sees those before it in its own trunk and branch. Serves every layer of a forward pass.

    Raises ValueError for a part without a token.
    """
    if not trees or min(min(tree.trunk, *tree.branches) if tree.branches else tree.trunk for tree in trees) < 1:
        raise ValueError("packed sequences need at least one token each")
    device = torch.device(device)
    return BranchAttention(trees, device) if HAS_FLASH and device.type == "cpu" else PaddedAttention(trees, device)


class PaddedAttention:
    """For any device: every branch is attended together with a copy of its trunk, by torch's causal attention."""

    __slots__ = ("_padding",)

    def __init__(self, trees: Sequence[Tree], device: torch.device) -> None:
        sequences = []
        for trunk, branches in _indices(trees):
            sequences += [np.concatenate((trunk, branch)) for branch in branches] or [trunk]
        self._padding = _Padding(sequences, device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]` -> `[tokens, heads, head_dim]`."""
        padded = [self._padding.split(x) for x in (q, k, v)]
        grouped = q.shape[1] != k.shape[1]
        out = []
        for query, key, value in zip(*padded, strict=True):
            out.append(F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped))
        return self._padding.join(out)


class BranchAttention:
    """For the CPU: trunks and branches attend to themselves, then all branches of a trunk together to the trunk.

    The two parts of a branch's softmax are joined by their log-sum-exps, which is exact; source: FlashAttention,
    https://arxiv.org/abs/2205.14135, section 3.1.
    """

    __slots__ = ("_crossings", "_padding")

    def __init__(self, trees: Sequence[Tree], device: torch.device) -> None:
        parts = list(_indices(trees))
        self._padding = _Padding([part for trunk, branches in parts for part in (trunk, *branches)], device)
        self._crossings = [
            (slice(trunk[0], trunk[-1] + 1), slice(trunk[-1] + 1, branches[-1][-1] + 1)) for trunk, branches in parts if branches
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]` -> `[tokens, heads, head_dim]`."""
        out: Tensor = _Branched.apply(q, k, v, self._padding, self._crossings)  # type: ignore[no-untyped-call]
        return out


class _Branched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, padding: _Padding, crossings: list[tuple[slice, slice]]) -> Tensor:
        parts = [_attend(*rows, causal=True) for rows in zip(*(padding.split(x) for x in (q, k, v)), strict=True)]
        out = padding.join([part for part, _ in parts])
        lse = padding.join([part.unsqueeze(-1) for _, part in parts])  # [tokens, heads, 1]
        for trunk, branches in crossings:
            seen, weight = _attend(_one(q[branches]), _one(k[trunk]), _one(v[trunk]), causal=False)
            seen, weight = seen[0].transpose(0, 1), weight[0].t().unsqueeze(-1)
            own = lse[branches]
            both = torch.logaddexp(own, weight)
            out[branches] = torch.lerp(seen.float(), out[branches].float(), (own - both).exp())
            lse[branches] = both
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.padding, ctx.crossings = padding, crossings
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Each part by itself: given the joined output and log-sum-exp, its scores have their share of the whole softmax."""
        q, k, v, out, lse = ctx.saved_tensors
        padding: _Padding = ctx.padding
        rows = zip(padding.split_once(gradient), *(padding.split(x) for x in (q, k, v, out, lse)), strict=True)
        parts = [_attend_backward(*row, causal=True) for row in rows]
        dq, dk, dv = (padding.join(list(grads)) for grads in zip(*parts, strict=True))
        for trunk, branches in ctx.crossings:
            q_side = [_one(x[branches]) for x in (gradient, q, out, lse)]
            more = _attend_backward(q_side[0], q_side[1], _one(k[trunk]), _one(v[trunk]), *q_side[2:], causal=False)
            for total, part, added in zip((dq, dk, dv), (branches, trunk, trunk), more, strict=True):
                total[part] += added[0].transpose(0, 1)
        return dq, dk, dv, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """`[rows, heads, tokens, head_dim]` -> the same, and its log-sum-exp `[rows, heads, tokens]` float32."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse


def _attend_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    dq, dk, dv = backward(gradient, q, k, v, out, lse.squeeze(-1), 0.0, causal)
    return dq, dk, dv


def _one(x: Tensor) -> Tensor:
    """`[tokens, heads, width]` -> `[1, heads, tokens, width]`."""
    return x.transpose(0, 1).unsqueeze(0)


class _Padding:
    """Sequences of similar length share a bucket, padded to its longest: one kernel call a bucket.

    Padding is at the end, so no real token attends to it; it repeats the sequence's last token, and its output is not
    read. A token that several sequences hold is read from the first of them.

    Args:
        sequences: flat indices of each sequence's tokens.
    """

    __slots__ = ("_gather", "_once", "_restore", "_shapes", "_sizes")

    def __init__(self, sequences: Sequence[Index], device: torch.device) -> None:
        counts = np.array([len(sequence) for sequence in sequences], dtype=np.int64)
        tokens = int(max(sequence[-1] for sequence in sequences)) + 1
        gather: list[Index] = []
        self._shapes: list[tuple[int, int]] = []
        for members in buckets(counts):
            longest = int(counts[members].max())
            gather += [np.pad(sequences[member], (0, longest - counts[member]), "edge") for member in members]
            self._shapes.append((len(members), longest))
        self._sizes = [rows * longest for rows, longest in self._shapes]
        flat = np.concatenate(gather)
        # The first place of each token; a sequence's padding lies behind its last token, so it is never taken.
        restore = np.full(tokens, len(flat), dtype=np.int64)
        np.minimum.at(restore, flat, np.arange(len(flat)))
        once = np.zeros(len(flat), dtype=bool)
        once[restore] = True
        self._gather, self._restore = (torch.from_numpy(array).to(device) for array in (flat, restore))
        self._once = torch.from_numpy(np.flatnonzero(~once)).to(device)

    def split(self, x: Tensor) -> list[Tensor]:
        """`[tokens, heads, width]` -> for each bucket `[rows, heads, longest, width]`."""
        return self._split(x.index_select(0, self._gather))

    def split_once(self, x: Tensor) -> list[Tensor]:
        """The same with 0 in the padding: the gradient of what is not read."""
        return self._split(x.index_select(0, self._gather).index_fill_(0, self._once, 0.0))

    def _split(self, padded: Tensor) -> list[Tensor]:
        parts = torch.split(padded, self._sizes)
        return [part.view(*shape, *part.shape[1:]).transpose(1, 2) for shape, part in zip(self._shapes, parts, strict=True)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The way back, without the padding."""
        flat = [part.transpose(1, 2).flatten(0, 1) for part in parts]
        return torch.cat(flat).index_select(0, self._restore)


def _indices(trees: Sequence[Tree]) -> list[tuple[Index, list[Index]]]:
    """Flat indices of each trunk and of its branches."""
    found, first = [], 0
    for tree in trees:
        ends = first + np.cumsum((tree.trunk, *tree.branches))
        trunk, *branches = np.split(np.arange(first, ends[-1], dtype=np.int64), ends[:-1] - first)
        found.append((trunk, branches))
        first = int(ends[-1])
    return found


def buckets(lengths: Index) -> list[Index]:
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
