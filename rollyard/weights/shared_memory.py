"""Weights through memory that trainer and engines of one machine share: one copy in, and what engines make of it.

The memory is anonymous and has two slots, used in turn. Nobody but its owner has to clean up: it is gone when the last
process that maps it is, however that ends, and two runs cannot meet in it. An engine opens it through /proc, so both
belong to one user. A slot begins with the version that is in it; while it is written it holds none.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from rollyard.errors import WeightSyncError
from rollyard.events import EngineId
from rollyard.protocols.devices import Device
from rollyard.types import Activity, Manifest, Sent, TensorInfo, WeightVersion
from rollyard.weights.delta import Changes, Scan, catch_up
from rollyard.weights.flat import Prepared, check, fill, marked, once_more, taken, views
from rollyard.weights.layout import Layout, compare
from rollyard.weights.slot import PAGE, allocate, map_all
from rollyard.weights.source import Source
from rollyard.weights.words import named

SLOTS = 2
STAMP = struct.Struct("<qqq")  # written, step, incarnation


class SharedMemoryPublisher:
    """Owns the memory. A slot is written only when no engine decodes with what is in it.

    Args:
        source: the tensors, on a CPU or a GPU.
        device: where they are changed; a version is copied there, between two steps.
        slots: one is enough where whoever takes a version copies it before the next one is published.
        delta: only what changed since the version before is written.

    Raises ConfigError where there is no such memory, or not enough.
    """

    def __init__(self, source: Source, device: Device, slots: int = SLOTS, delta: bool = False) -> None:
        self._source, self._device, self._delta = source, device, delta
        self._layout = Layout.of(source.infos)
        self._handle = allocate(slots * _slot_size(self._layout))
        self._map = map_all(self._handle)
        self._slots = [views(_part(self._map, self._layout, slot), self._layout) for slot in range(slots)]
        self._holds: list[Manifest | None] = [None] * slots
        self._offered = slots - 1  # the slot of the last offer
        self._taken: dict[EngineId, int] = {}  # slots that engines decode with
        self._last, self._sent = Changes(), Sent(0)

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Copy the tensors into a slot. Raises WeightSyncError when engines use all slots."""
        return await self._device.run(self._device.spans.timed(Activity.SYNC, self._publish, "publish"), version)

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        """What lies in the slot of the last offer. Raises WeightSyncError when there was none."""
        return once_more(self._holds[self._offered])

    async def deliver(self) -> Sent:
        """What was offered lies in memory."""
        return self._sent

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """A version that was published anew lies in two slots: the engine has that of the last offer then."""
        self._taken.pop(engine, None)
        for slot in sorted(range(len(self._holds)), key=lambda slot: slot != self._offered):
            held = self._holds[slot]
            if held is not None and held.version == version:
                self._taken[engine] = slot
                return

    def lost(self, engine: EngineId) -> None:
        self._taken.pop(engine, None)

    def close(self) -> None:
        """Give the memory back, once engines have let go of it too."""
        if self._handle >= 0:
            self._slots.clear()
            os.close(self._handle)
            self._handle = -1

    def _publish(self, version: WeightVersion) -> Manifest:
        found = list[int]()
        each = marked(self._source.each(version), found)
        slot, name = self._free(version), secrets.token_hex(8)
        held, before = self._holds[slot], self._holds[self._offered]
        self._holds[slot] = None
        _write_stamp(self._map, self._layout, slot, None)
        if self._delta and before is not None and before.version.step != version.step and slot != self._offered:
            self._change(slot, "" if held is None else held.name, before.name, name, each)
        else:  # a version that was offered before, such as a canary's, goes the whole way
            fill(self._slots[slot], each)
            self._last, self._sent = Changes(), Sent(self._layout.size)
        if self._source.where.type != "cpu":
            torch.cuda.synchronize()
        _write_stamp(self._map, self._layout, slot, version)
        path = f"/proc/{os.getpid()}/fd/{self._handle}#{slot}"
        manifest = Manifest(version, self._source.infos, self._sent.bytes, path, tuple(found), name=name)
        self._holds[slot], self._offered = manifest, slot
        return manifest

    def _change(self, slot: int, held: str, before: str, name: str, each: Iterable[tuple[str, Tensor]]) -> None:
        """Bring a slot to the version that was offered last, then to the new one."""
        buckets = self._layout.buckets()
        target, base = _part(self._map, self._layout, slot), _part(self._map, self._layout, self._offered)
        for number, (start, end) in enumerate(buckets):
            catch_up(number, target[start:end], held, base[start:end], before, self._last)
        scan = Scan(target, self._layout, buckets)
        frames = tuple(scan.frames(each))
        self._last = Changes(before, name, frames)
        written = sum(end - start if frame is None else len(frame) for frame, (start, end) in zip(frames, buckets, strict=True))
        self._sent = Sent(written, scan.share)

    def _free(self, version: WeightVersion) -> int:
        """That of the last offer comes last."""
        count = len(self._holds)
        for slot in ((self._offered + 1 + number) % count for number in range(count)):
            if slot not in self._taken.values():
                return slot
        has = {engine: self._holds[slot] for engine, slot in sorted(self._taken.items())}
        users = ", ".join(f"{engine} has {named(held.version)}" for engine, held in has.items() if held is not None)
        raise WeightSyncError(f"{named(version)} finds no free slot: {users}")


class SharedMemoryReceiver:
    """Maps the publisher's memory. Tensors are views of it where the engine is on the CPU: taking them copies nothing.

    Args:
        expected: the engine's own tensors.
        device: where they are wanted.
    """

    def __init__(self, expected: Sequence[TensorInfo], device: torch.device) -> None:
        self._expected, self._device = expected, device
        self._opened = ""
        self._map: mmap.mmap | None = None
        self._prepared: Prepared | None = None

    def prepare(self, manifest: Manifest) -> None:
        """Find the tensors and check them. Raises WeightSyncError when they are not there."""
        compare(manifest.tensors, self._expected)
        self._prepared = None
        path, _, slot = manifest.source.partition("#")
        layout = Layout.of(manifest.tensors)
        shared = self._mapped(path)
        if len(shared) < (int(slot) + 1) * _slot_size(layout):
            raise WeightSyncError(f"the trainer's memory {path} ends before slot {slot} does")
        if _read_stamp(shared, layout, int(slot)) != manifest.version:
            raise WeightSyncError(f"{named(manifest.version)} is not in slot {slot} of {path}")
        arrived = views(_part(shared, layout, int(slot)), layout)
        if self._device.type != "cpu":
            arrived = {name: tensor.to(self._device) for name, tensor in arrived.items()}
        check(manifest, arrived, manifest.fingerprints)
        self._prepared = manifest.version, arrived

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        """Raises WeightSyncError when another version was prepared."""
        return taken(self._prepared, version)

    def close(self) -> None:
        self._prepared = self._map = None

    def _mapped(self, path: str) -> mmap.mmap:
        if self._map is None or path != self._opened:
            try:
                handle = os.open(path, os.O_RDWR)
                try:
                    self._map = map_all(handle)
                finally:
                    os.close(handle)
            except (OSError, ValueError) as error:
                raise WeightSyncError(f"the trainer's memory {path} cannot be mapped: {error}") from error
            self._opened = path
        return self._map


def _slot_size(layout: Layout) -> int:
    return PAGE + -(-layout.size // PAGE) * PAGE


def _part(shared: mmap.mmap, layout: Layout, slot: int) -> Tensor:
    return torch.frombuffer(shared, dtype=torch.uint8, count=layout.size, offset=slot * _slot_size(layout) + PAGE)


def _write_stamp(shared: mmap.mmap, layout: Layout, slot: int, version: WeightVersion | None) -> None:
    STAMP.pack_into(shared, slot * _slot_size(layout), version is not None, *(version or (0, 0)))


def _read_stamp(shared: mmap.mmap, layout: Layout, slot: int) -> WeightVersion | None:
    written, step, incarnation = STAMP.unpack_from(shared, slot * _slot_size(layout))
    return WeightVersion(step, incarnation) if written else None
