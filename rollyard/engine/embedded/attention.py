"""The paged key-value cache and attention over it: at most two attention calls a layer, whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from rollyard.engine.embedded.batch import Rows, StepBatch
from rollyard.model.architecture import Architecture

SHORT = 256  # tokens: up to here plain matrix products beat the fused kernel on a CPU, up to twice for one query a row


class KeyValueCache:
    """Keys and values of all pages, one tensor a layer: `[2 * kv_heads, pages * page_tokens, head_dim]`, keys first.

    Heads come first so that what is gathered for a sequence lies in one piece for each head. Memory grows with the
    pages in use, doubling, up to `pages`.
    """

    def __init__(self, arch: Architecture, pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        self._pages, self.page_tokens = pages, page_tokens
        self.kv_heads, self.head_dim = arch.kv_heads, arch.head_dim
        self._dtype, self._device = dtype, device
        self._allocated = 0
        self._layers = [self._empty(0) for _ in range(arch.layers)]

    @property
    def bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self._layers)

    def reserve(self, pages: int) -> None:
        """Make sure that pages below number `pages` have memory. What is cached stays."""
        if pages <= self._allocated:
            return
        self._allocated = min(max(pages, 2 * self._allocated), self._pages)
        for index, old in enumerate(self._layers):
            grown = self._empty(self._allocated)
            grown[:, : old.shape[1]] = old
            self._layers[index] = grown

    def release(self) -> None:
        """Give all memory back."""
        self._allocated = 0
        self._layers = [self._empty(0) for _ in self._layers]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages; all sources are read before any target is written."""
        source, target = torch.tensor(copies, device=self._device).unbind(1)
        for layer in self._layers:
            paged = layer.view(2 * self.kv_heads, self._allocated, -1)
            paged.index_copy_(1, target, paged.index_select(1, source))

    def write(self, layer: int, k: Tensor, v: Tensor, places: Tensor) -> None:
        """k and v `[tokens, kv_heads, head_dim]` to `places` `[tokens]`."""
        self._layers[layer].index_copy_(1, places, torch.cat((k, v), dim=1).transpose(0, 1))

    def gather(self, layer: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """Keys and values of some sequences, each `[kv_heads, rows, length, head_dim]`."""
        paged = self._layers[layer].view(2 * self.kv_heads, self._allocated, -1)
        both = paged.index_select(1, rows.pages).view(2, self.kv_heads, rows.rows, -1, self.head_dim)
        return both[0], both[1]

    def _empty(self, pages: int) -> Tensor:
        # Zeros, because a masked place still takes part as 0 x value, and memory as it comes may hold NaN.
        shape = (2 * self.kv_heads, pages * self.page_tokens, self.head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)


class PagedAttention:
    """Attention of one step: an `Attend` for `CausalLM.hidden`. Writes the step's keys and values first."""

    def __init__(self, cache: KeyValueCache, batch: StepBatch) -> None:
        self._cache, self._batch = cache, batch

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]` -> `[tokens, heads, head_dim]`."""
        batch, cache = self._batch, self._cache
        cache.write(layer, k, v, batch.places)
        parts = []
        if batch.decode is not None:
            parts.append(_decode(q[: batch.decodes], *cache.gather(layer, batch.decode), batch.decode))
        if batch.chunks is not None:
            parts.append(_chunks(q[batch.decodes :], *cache.gather(layer, batch.chunks), batch.chunks))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


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
