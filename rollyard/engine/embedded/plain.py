"""Decoding with plain torch: the same forward pass that the trainer runs, over pages; at most two attention calls a layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from rollyard.engine.embedded.batch import FlatBatch, Ints, flatten
from rollyard.engine.embedded.cache import PagedMemory
from rollyard.engine.embedded.pages import PagePool
from rollyard.engine.embedded.sampler import by_inverse_cdf
from rollyard.engine.embedded.scheduler import Plan
from rollyard.model.transformer import CausalLM

SHORT = 256  # tokens: up to here plain matrix products beat the fused kernel on a CPU, up to twice for one query a row


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences that attend together, padded to the most pages (and, for chunks, to the longest chunk).

    `length` is pages x page_tokens, `tokens` the padded chunk length. Of the two index tensors `pad` finds the flat
    token for each padded place, `unpad` the padded place of each flat token; both None when each row is one token.
    """

    rows: int
    tokens: int
    pages: Tensor  # [rows * pages a row] int64
    mask: Tensor  # decode [1, rows, 1, length], chunks [rows, 1, tokens, length]: 0 where attended, -inf elsewhere
    pad: Tensor | None = None  # [rows * tokens] int64
    unpad: Tensor | None = None  # [flat tokens of these rows] int64


class PlainDecoder:
    """Decodes with the model's own parameters, or with a copy in another number format.

    A layer of the cache is `[2 * kv_heads, pages, page_tokens * head_dim]`, keys first: heads come first so that what
    is gathered for a sequence lies in one piece for each head.
    """

    def __init__(self, model: CausalLM, pool: PagePool, dtype: torch.dtype, name: str = "plain") -> None:
        self.name = name
        arch, weight = model.architecture, model.head_weight
        self._source, self._dtype, self._device, self._pool = model, dtype, weight.device, pool
        self._model = model if weight.dtype == dtype else CausalLM(arch, dtype, weight.device)
        shape = (2 * arch.kv_heads, 0, pool.page_tokens * arch.head_dim)
        self.memory = PagedMemory(arch.layers, shape, 1, pool.size, dtype, weight.device, zeros=True)
        self.copied_bytes, self.linear_s = 0, 0.0

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the parameters, where the number format differs."""
        if self._model is self._source:
            return
        for target, source in zip(self._model.parameters(), self._source.parameters(), strict=True):
            target.copy_(source)
        self.copied_bytes = sum(each.numel() * each.element_size() for each in self._model.parameters())

    def release(self) -> None:
        """Give back the cache."""
        self.memory.release()

    def hidden(self, plan: Plan) -> Tensor:
        """`[tokens, hidden]`."""
        flat = flatten(plan, self._pool.page_tokens)
        attend = _PagedAttention(self.memory, self._model.architecture.head_dim, flat, self._parts(flat), self._to(flat.places))
        return self._model.hidden(self._to(flat.ids), self._to(flat.positions), attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, vocab]` float32."""
        return self._model.logits(hidden)

    def choose(self, shaped: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A `sampler.Choose`."""
        return by_inverse_cdf(shaped, noise)

    def _parts(self, flat: FlatBatch) -> tuple[Rows | None, Rows | None]:
        """Decoding sequences, and chunks."""
        decode = chunks = None
        split = flat.decodes
        if split:
            pages = flat.tables[:split, : flat.used[:split].max()]
            beyond = np.arange(pages.shape[1] * self._pool.page_tokens) > flat.starts[:split, None]
            decode = Rows(split, 1, self._to(pages.ravel()), self._mask(beyond[None, :, None, :]))
        if len(flat.sizes) > split:
            chunks = self._chunk_rows(flat.sizes[split:], flat.starts[split:], flat.tables[split:, : flat.used[split:].max()])
        return decode, chunks

    def _chunk_rows(self, sizes: Ints, starts: Ints, pages: Ints) -> Rows:
        rows, longest = len(sizes), int(sizes.max())
        row = np.repeat(np.arange(rows), sizes)
        places = row * longest + np.arange(len(row)) - (np.cumsum(sizes) - sizes)[row]
        pad = np.zeros(rows * longest, np.int64)  # padding repeats the first token, and nobody reads what comes of it
        pad[places] = np.arange(len(places))
        at = starts[:, None] + np.arange(longest)
        beyond = np.arange(pages.shape[1] * self._pool.page_tokens) > at[:, :, None]
        return Rows(rows, longest, self._to(pages.ravel()), self._mask(beyond[:, None]), self._to(pad), self._to(places))

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        return torch.from_numpy(np.where(hidden, np.float32(-np.inf), np.float32(0.0))).to(self._device, self._dtype)

    def _to(self, array: Ints) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class _PagedAttention:
    """Attention of one step: an `Attend` for `CausalLM.hidden`. Writes the step's keys and values first."""

    def __init__(
        self, memory: PagedMemory, head_dim: int, flat: FlatBatch, parts: tuple[Rows | None, Rows | None], places: Tensor
    ) -> None:
        self._memory, self._head_dim, self._places = memory, head_dim, places
        self._split, (self._decode, self._chunks) = flat.decodes, parts

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]` -> `[tokens, heads, head_dim]`."""
        cache = self._memory.layers[layer]
        cache.view(cache.shape[0], -1, self._head_dim).index_copy_(1, self._places, torch.cat((k, v), dim=1).transpose(0, 1))
        out = []
        if self._decode is not None:
            out.append(_decode(q[: self._split], *self._gather(cache, self._decode), self._decode))
        if self._chunks is not None:
            out.append(_chunks(q[self._split :], *self._gather(cache, self._chunks), self._chunks))
        return out[0] if len(out) == 1 else torch.cat(out)

    def _gather(self, cache: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values of some sequences, each `[kv_heads, rows, length, head_dim]`."""
        both = cache.index_select(1, rows.pages).view(2, cache.shape[0] // 2, rows.rows, -1, self._head_dim)
        return both[0], both[1]


def _decode(q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """One query a sequence: the query heads of a key-value head take the place of its queries, so no key is repeated."""
    kv_heads, head_dim = keys.shape[0], keys.shape[3]
    grouped = q.reshape(rows.rows, kv_heads, -1, head_dim).transpose(0, 1)
    if keys.shape[2] <= SHORT and keys.dtype is torch.float32 and keys.device.type == "cpu":
        scores = torch.matmul(grouped * head_dim**-0.5, keys.transpose(-1, -2)).add_(rows.mask)
        out = torch.matmul(scores.softmax(-1), values)
    else:
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows.mask)
    return out.transpose(0, 1).reshape(q.shape)


def _chunks(q: Tensor, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    assert rows.pad is not None and rows.unpad is not None
    heads, head_dim = q.shape[1], q.shape[2]
    padded = q.index_select(0, rows.pad).view(rows.rows, rows.tokens, heads, head_dim).transpose(1, 2)
    out = F.scaled_dot_product_attention(
        padded, keys.transpose(0, 1), values.transpose(0, 1), attn_mask=rows.mask, enable_gqa=True
    )
    return out.transpose(1, 2).reshape(-1, heads, head_dim).index_select(0, rows.unpad)
