"""Where tensors lie in one flat piece of memory (PURE), and in which pieces it travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from rollyard.errors import WeightSyncError
from rollyard.types import TensorInfo

TRAILER = ""  # no tensor has this name
ALIGNMENT = 64  # bytes: a tensor begins where a cache line does
BUCKET = 32 * 2**20  # bytes: long enough for the full rate, short enough that copying one hides behind sending another
SIZES = {"torch.float32": 4, "torch.bfloat16": 2, "torch.float16": 2, "torch.uint8": 1}  # bytes of one number


@dataclass(frozen=True, slots=True)
class Place:
    """Where one tensor lies."""

    info: TensorInfo
    offset: int  # bytes
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """All tensors, one behind the other in the order they were given."""

    places: tuple[Place, ...]
    size: int  # bytes, padding included

    @classmethod
    def of(cls, tensors: Sequence[TensorInfo]) -> Layout:
        """Raises WeightSyncError for a number format that neither weights nor a state of a trainer have."""
        places, offset = [], 0
        for info in tensors:
            if info.dtype not in SIZES:
                raise WeightSyncError(f"{info.name} is {info.dtype}; what travels is one of {', '.join(SIZES)}")
            size = prod(info.shape) * SIZES[info.dtype]
            places.append(Place(info, offset, size))
            offset += -(-size // ALIGNMENT) * ALIGNMENT
        return cls(tuple(places), offset)

    @classmethod
    def with_trailer(cls, tensors: Sequence[TensorInfo]) -> Layout:
        """And behind all tensors their fingerprints, of 8 bytes each, which are known last."""
        return cls.of((*tensors, TensorInfo(TRAILER, (8 * len(tensors),), "torch.uint8")))

    def buckets(self, most: int | None = None) -> tuple[tuple[int, int], ...]:
        """Ranges of bytes `(start, end)` that cover it, of at most `most` bytes (BUCKET) rounded down to whole cache lines."""
        step = max((BUCKET if most is None else most) // ALIGNMENT, 1) * ALIGNMENT
        return tuple((start, min(start + step, self.size)) for start in range(0, self.size, step))


def compare(sent: Sequence[TensorInfo], consumed: Sequence[TensorInfo]) -> None:
    """Raise WeightSyncError unless both sides have the same tensors, in whatever order."""
    theirs, ours = {info.name: info for info in sent}, {info.name: info for info in consumed}
    if theirs.keys() != ours.keys():
        raise WeightSyncError(f"tensors only on one side: {', '.join(sorted(theirs.keys() ^ ours.keys()))}")
    for name, info in theirs.items():
        if info != ours[name]:
            raise WeightSyncError(f"{name} was sent as {_shown(info)}, and the engine has {_shown(ours[name])}")


def _shown(info: TensorInfo) -> str:
    return f"{list(info.shape)} {info.dtype.removeprefix('torch.')}"
