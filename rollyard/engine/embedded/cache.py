"""The memory behind the pages of the key-value cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PagedMemory:
    """One tensor a layer, in which one axis counts pages. It grows with the pages in use, doubling, up to `pages`.

    Args:
        layers: of the model.
        shape: of one layer; the entry at `axis` is filled in.
        axis: which axis counts pages.
        pages: at most.
        zeros: fill new memory, which as it comes may hold NaN: for a decoder whose masked places take part as 0 x value.
    """

    def __init__(
        self,
        layers: int,
        shape: Sequence[int],
        axis: int,
        pages: int,
        dtype: torch.dtype,
        device: torch.device,
        zeros: bool = False,
    ) -> None:
        self._new = torch.zeros if zeros else torch.empty
        self._shape, self._axis, self._pages, self._dtype, self._device = list(shape), axis, pages, dtype, device
        self._allocated = 0
        self.layers: list[Tensor] = [self._empty(0) for _ in range(layers)]

    @property
    def bytes(self) -> int:
        return sum(layer.numel() * layer.element_size() for layer in self.layers)

    def reserve(self, pages: int) -> None:
        """Make sure that pages below number `pages` have memory. What is cached stays."""
        if pages <= self._allocated:
            return
        before, self._allocated = self._allocated, min(max(pages, 2 * self._allocated), self._pages)
        for index, old in enumerate(self.layers):
            self.layers[index] = self._empty(self._allocated)
            self.layers[index].narrow(self._axis, 0, before).copy_(old)

    def release(self) -> None:
        """Give all memory back."""
        self._allocated = 0
        self.layers = [self._empty(0) for _ in self.layers]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, target) pages; all sources are read before any target is written."""
        source, target = torch.tensor(copies, device=self._device).unbind(1)
        for layer in self.layers:
            layer.index_copy_(self._axis, target, layer.index_select(self._axis, source))

    def _empty(self, pages: int) -> Tensor:
        shape = [*self._shape[: self._axis], pages, *self._shape[self._axis + 1 :]]
        return self._new(shape, dtype=self._dtype, device=self._device)
