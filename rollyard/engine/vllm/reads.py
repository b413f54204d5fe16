"""Which part of each tensor a model's loader really reads, seen at torch's operations: for one shard of several."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rollyard.types import Slice


class Reads(TorchDispatchMode):
    """While it is entered, notes every read of memory that belongs to `tensors`. A view reads nothing."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._whole = sorted(
            ((tensor.data_ptr(), name, tensor) for name, tensor in tensors.items() if tensor.numel()), key=lambda each: each[:2]
        )
        self._starts = [start for start, _, _ in self._whole]
        self.found: dict[str, list[tuple[Slice, ...]]] = {}  # by name: of each read, its extent in every dimension

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and not leaf.is_meta and leaf.numel():
                    self._note(leaf)
        return func(*args, **(kwargs or {}))

    def _note(self, read: Tensor) -> None:
        at = bisect_right(self._starts, read.data_ptr()) - 1
        if at < 0:
            return
        start, name, whole = self._whole[at]
        offset = read.data_ptr() - start
        if offset >= whole.nbytes:
            return
        extents = _extents(whole, read, offset // whole.itemsize)
        if extents not in (noted := self.found.setdefault(name, [])):
            noted.append(extents)


def _extents(whole: Tensor, read: Tensor, offset: int) -> tuple[Slice, ...]:
    """Where a view lies in the tensor that it is of; all of it where that is not plain."""
    if read.stride() != whole.stride() or read.dtype != whole.dtype:
        return tuple(Slice(dim, 0, size) for dim, size in enumerate(whole.shape))
    found = []
    for dim, (stride, size) in enumerate(zip(whole.stride(), read.shape, strict=True)):
        first, offset = divmod(offset, stride)
        found.append(Slice(dim, first, first + size))
    return tuple(found)


def outside(reads: Iterable[tuple[Slice, ...]], share: Slice | None) -> Slice | None:
    """The first read that goes beyond a share, if one does."""
    if share is not None:
        for extents in reads:
            extent = extents[share.dim]
            if extent.start < share.start or extent.end > share.end:
                return extent
    return None


def share_bytes(tensors: Mapping[str, Tensor], share: Mapping[str, Slice | None]) -> int:
    """What a shard takes of these tensors."""
    total = 0
    for name, tensor in tensors.items():
        part = share.get(name)
        total += tensor.nbytes if part is None else tensor.nbytes // tensor.shape[part.dim] * (part.end - part.start)
    return total


def beyond(found: Mapping[str, Sequence[tuple[Slice, ...]]], share: Mapping[str, Slice | None]) -> str:
    """In words, what was read that no share says; empty when nothing was."""
    for name, reads in found.items():
        if (extent := outside(reads, share.get(name))) is not None:
            part = share[name]
            assert part is not None, "all of it was its share"
            said = f"{part.start} to {part.end}"
            return f"{name}: its loader reads {extent.start} to {extent.end} of dimension {part.dim}, and its share is {said}"
    return ""
