"""Only the numbers that changed, and where they are: lossless, one frame for each bucket of a flat buffer.

Whatever the numbers are, they are compared and copied as 16-bit words, so that any bit pattern survives. A frame is the number
of changed words in each block of 65,536, then of every changed word where it lies in its block, then the words themselves,
then a checksum. Words are compared four at a time at first, so what did not change costs little more than reading it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollyard.errors import WeightSyncError
from rollyard.events import EngineId
from rollyard.types import Manifest, WeightVersion
from rollyard.weights.layout import Layout

BLOCK = 65536  # words: where one lies in it takes 16 bits
PIECE = 2**20  # words that are looked at, or written, at once
Bucket = tuple[int, int]  # bytes: start and end within the buffer
Frame = Tensor | None  # `[bytes]` uint8; None: the bucket as it is, which is no longer


class Scan:
    """Brings `buffer` up to date with tensors that come one after the other, and makes the frames of that.

    Args:
        buffer: `[bytes]` uint8, the version before in this layout.
        layout: of the buffer.
        buckets: that cover it.
    """

    def __init__(self, buffer: Tensor, layout: Layout, buckets: Sequence[Bucket]) -> None:
        self._words, self._layout, self._buckets = _words(buffer), layout, buckets
        self.unchanged = self.numbers = 0

    @property
    def share(self) -> float:
        """Of the numbers, that are as they were."""
        return self.unchanged / max(self.numbers, 1)

    def frames(self, each: Iterable[tuple[str, Tensor]]) -> Iterator[Frame]:
        """A frame for each bucket, as soon as all tensors in it have come, in the layout's order."""
        building, done = _Building(self._buckets[0]) if self._buckets else None, 0
        for place, (_, tensor) in zip(self._layout.places, each, strict=True):
            words, changed = _whole_words(tensor).to(self._words.device), 0
            per_number = max(tensor.element_size() // 2, 1)
            begin, end = place.offset // 2, place.offset // 2 + len(words)
            while begin < end:
                assert building is not None
                if begin >= building.end:
                    yield building.frame()
                    done += 1
                    building = _Building(self._buckets[done])
                until = min(end, begin + PIECE, building.end)
                first = place.offset // 2
                changed += self._piece(building, begin, until, words[begin - first : until - first], per_number)
                begin = until
            self.numbers += tensor.numel()
            self.unchanged += tensor.numel() - changed
        while building is not None:  # what is left is padding
            yield building.frame()
            done += 1
            building = _Building(self._buckets[done]) if done < len(self._buckets) else None

    def _piece(self, building: _Building, begin: int, end: int, new: Tensor, per_number: int) -> int:
        """How many numbers changed."""
        old = self._words[begin:end]
        at = changed(new, old)
        values = new.index_select(0, at)
        building.add(at + (begin - building.begin), values)
        if 2 * len(at) > len(new):
            old.copy_(new)
        else:
            old.index_copy_(0, at, values)
        return len(at) if per_number == 1 else len(torch.unique_consecutive(at // per_number))


class _Building:
    """The frame of one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.begin, self.end = bucket[0] // 2, bucket[1] // 2  # words
        self._blocks = -(-(self.end - self.begin) // BLOCK)
        self._counts: Tensor | None = None
        self._places: list[Tensor] = []
        self._values: list[Tensor] = []
        self._found, self._whole = 0, False

    def add(self, at: Tensor, values: Tensor) -> None:
        """Changed words, by where they lie in the bucket, in ascending order."""
        self._found += len(at)
        if self._whole or 4 * self._blocks + 4 * self._found + 16 >= 2 * (self.end - self.begin):
            self._whole = True
            self._places.clear()
            self._values.clear()
            return
        counts = torch.bincount(at >> 16, minlength=self._blocks)
        self._counts = counts if self._counts is None else self._counts + counts
        self._places.append(at.to(torch.int16))  # the lower 16 bits
        self._values.append(values)

    def frame(self) -> Frame:
        if self._whole:
            return None
        if not self._found or self._counts is None:
            return torch.empty(0, dtype=torch.uint8)
        counts = self._counts.to(torch.int32).view(torch.int16)
        parts = [counts, *self._places, *self._values]
        short = -sum(map(len, parts)) % 4
        content = torch.cat([*parts, counts.new_zeros(short)]).view(torch.int64)
        return torch.cat([content, content.sum().view(1)]).view(torch.uint8)


def apply(frame: Tensor, bucket: Tensor, number: int) -> None:
    """Bring a bucket of the version before up to date. Raises WeightSyncError, naming it, for a frame that was not sent so.

    Args:
        bucket: `[bytes]` uint8.
        number: which it is, counted from 1.
    """
    if not len(frame):
        return
    content, words = frame.view(torch.int64), _words(bucket)
    if int(content[:-1].sum()) != int(content[-1]):
        raise WeightSyncError(f"what changed in bucket {number} arrived changed")
    blocks, packed = -(-len(words) // BLOCK), frame.view(torch.int16)
    counts = packed[: 2 * blocks].view(torch.int32).to(torch.int64)
    found, start = int(counts.sum()), 2 * blocks
    places, values = packed[start : start + found], packed[start + found : start + 2 * found]
    block = torch.arange(blocks, dtype=torch.int16, device=frame.device).repeat_interleave(counts)
    for begin in range(0, found, PIECE):
        part = slice(begin, begin + PIECE)
        at = (block[part].to(torch.int64) << 16) | (places[part].to(torch.int64) & 0xFFFF)
        words.index_copy_(0, at, values[part])


def changed(new: Tensor, old: Tensor) -> Tensor:
    """`[changed]` int64, ascending: where two `[words]` int16 differ. Both begin at a multiple of 8 bytes and end at one."""
    wide_new, wide_old = new.view(torch.int64), old.view(torch.int64)
    wide = _where(torch.ne(wide_new, wide_old))
    fine = torch.ne(wide_new.index_select(0, wide).view(torch.int16), wide_old.index_select(0, wide).view(torch.int16))
    at = _where(fine)
    return (wide.index_select(0, at >> 2) << 2) + (at & 3)


def _where(mask: Tensor) -> Tensor:
    """numpy finds them several times as fast as torch on a CPU."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(mask.numpy()))
    return mask.nonzero().view(-1)


def _words(buffer: Tensor) -> Tensor:
    return buffer.view(torch.int16)


def _whole_words(tensor: Tensor) -> Tensor:
    """`[words]` int16 of all its bytes, with zeros up to a multiple of 8 bytes; a copy only where it must be."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if len(flat) % 8 or flat.storage_offset() % 8 or flat.data_ptr() % 8:
        padded = torch.zeros(-(-len(flat) // 8) * 8, dtype=torch.uint8, device=flat.device)
        padded[: len(flat)].copy_(flat)
        flat = padded
    return flat.view(torch.int16)


class Bases:
    """Which contents an offer may be made against: what all its engines decode with.

    Args:
        allowed: only what changed may travel at all.
    """

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._has: dict[EngineId, str] = {}  # names of contents
        self._offered: Manifest | None = None

    def of(self, held: Manifest | None, version: WeightVersion, engines: Sequence[EngineId]) -> str:
        """Empty: all of it travels; also of a version that was offered before, as a canary's are, which proves the whole way."""
        if not self._allowed or held is None or version.step == held.version.step or not engines:
            return ""
        return held.name if all(self._has.get(engine) == held.name for engine in engines) else ""

    def offer(self, manifest: Manifest) -> Manifest:
        """These contents are on offer from now on."""
        self._offered = manifest
        return manifest

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        if self._offered is not None and self._offered.version == version:
            self._has[engine] = self._offered.name
        else:
            self.lost(engine)

    def lost(self, engine: EngineId) -> None:
        self._has.pop(engine, None)


@dataclass(frozen=True, slots=True)
class Changes:
    """What made the contents of one name of those of another."""

    before: str = ""
    after: str = ""
    frames: tuple[Frame, ...] = ()


def catch_up(number: int, target: Tensor, holds: str, base: Tensor, base_holds: str, last: Changes) -> None:
    """Make a bucket of `target` what that of `base` is: by what changed, where that is known, else by a copy.

    Args:
        number: which it is, counted from 0.
        target: `[bytes]` uint8, a bucket of the contents that are called `holds`.
    """
    if holds == base_holds:
        return
    frame = last.frames[number] if (holds, base_holds) == (last.before, last.after) else None
    if frame is None:
        target.copy_(base)
    else:
        apply(frame, target, number + 1)
