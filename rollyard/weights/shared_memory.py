"""Weights through memory that trainer and engines of one machine share: one copy in, and what engines make of it.

The memory is anonymous and has two slots, used in turn. Nobody but its owner has to clean up: it is gone when the last
process that maps it is, however that ends, and two runs cannot meet in it. An engine opens it through /proc, so both
belong to one user. A slot begins with the version that is in it; while it is written it holds none.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rollyard.errors import ConfigError, WeightSyncError
from rollyard.events import EngineId
from rollyard.model.transformer import CausalLM
from rollyard.protocols import Device
from rollyard.types import Manifest, TensorInfo, WeightVersion
from rollyard.weights.flat import Prepared, check, fill, fingerprints, infos, model_infos, named, taken, views, whole
from rollyard.weights.layout import Layout, compare

SLOTS = 2
PAGE = 4096  # bytes in front of each slot
STAMP = struct.Struct("<qqq")  # written, step, incarnation


class SharedMemoryPublisher:
    """Owns the memory. A slot is written only when no engine decodes with what is in it.

    Args:
        model: the policy, on a CPU or a GPU.
        device: where it is trained; a version is copied there, between two steps.

    Raises ConfigError where there is no such memory, or not enough.
    """

    def __init__(self, model: CausalLM, device: Device) -> None:
        self._model, self._device = model, device
        self._layout = Layout.of(model_infos(model))
        self._handle = _allocate(SLOTS * _slot_size(self._layout))
        self._map = _map(self._handle, self._layout)
        self._slots = [views(_part(self._map, self._layout, slot), self._layout) for slot in range(SLOTS)]
        self._holds: list[tuple[Manifest, int] | None] = [None] * SLOTS  # and the generation of the parameters
        self._taken: dict[EngineId, WeightVersion] = {}

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Copy the parameters into a slot, unless they are in one. Raises WeightSyncError when engines use all slots."""
        return await self._device.run(self._publish, version)

    async def deliver(self) -> None:
        """What was offered lies in memory."""

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        self._taken[engine] = version

    def lost(self, engine: EngineId) -> None:
        self._taken.pop(engine, None)

    def close(self) -> None:
        """Give the memory back, once engines have let go of it too."""
        if self._handle >= 0:
            self._slots.clear()
            os.close(self._handle)
            self._handle = -1

    def _publish(self, version: WeightVersion) -> Manifest:
        parameters, generation = whole(self._model, version), self._model.stamp.generation
        for held in self._holds:
            if held is not None and held[1] == generation and held[0].version == version:
                return replace(held[0], bytes_copied=0)  # not every engine took it the first time
        slot = self._free(version)
        self._holds[slot] = None
        _write_stamp(self._map, self._layout, slot, None)
        fill(self._slots[slot], parameters)
        if self._model.head_weight.device.type != "cpu":
            torch.cuda.synchronize()
        _write_stamp(self._map, self._layout, slot, version)
        source = f"/proc/{os.getpid()}/fd/{self._handle}#{slot}"
        manifest = Manifest(version, infos(parameters), self._layout.size, source, fingerprints(parameters))
        self._holds[slot] = manifest, generation
        return manifest

    def _free(self, version: WeightVersion) -> int:
        for slot, held in enumerate(self._holds):
            if held is None or held[0].version not in self._taken.values():
                return slot
        users = ", ".join(f"{engine} has {named(has)}" for engine, has in sorted(self._taken.items()))
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
        shared = self._mapped(path, layout)
        if _read_stamp(shared, layout, int(slot)) != manifest.version:
            raise WeightSyncError(f"{named(manifest.version)} is not in slot {slot} of {path}")
        arrived = views(_part(shared, layout, int(slot)), layout)
        if self._device.type != "cpu":
            arrived = {name: tensor.to(self._device) for name, tensor in arrived.items()}
        check(manifest, arrived)
        self._prepared = manifest.version, arrived

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        """Raises WeightSyncError when another version was prepared."""
        return taken(self._prepared, version)

    def close(self) -> None:
        self._prepared = self._map = None

    def _mapped(self, path: str, layout: Layout) -> mmap.mmap:
        if self._map is None or path != self._opened:
            try:
                handle = os.open(path, os.O_RDWR)
                try:
                    self._map = _map(handle, layout)
                finally:
                    os.close(handle)
            except (OSError, ValueError) as error:
                raise WeightSyncError(f"the trainer's memory {path} cannot be mapped: {error}") from error
            self._opened = path
        return self._map


def _allocate(size: int) -> int:
    if not hasattr(os, "memfd_create"):
        remedy = "use checkpoint or broadcast"
        raise ConfigError("this system has no anonymous shared memory", where="weights.transport", remedy=remedy)
    handle = os.memfd_create("rollyard-weights", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(handle, 0, size)  # all of it now: a full machine says so here, not by a bus error later
    except OSError as error:
        os.close(handle)
        remedy = "free memory, or use checkpoint or broadcast"
        raise ConfigError(f"{size} bytes of shared memory: {error}", where="weights.transport", remedy=remedy) from error
    return handle


def _map(handle: int, layout: Layout) -> mmap.mmap:
    """All pages present at once: faulting them in one by one would take longer than the copy."""
    return mmap.mmap(handle, SLOTS * _slot_size(layout), mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _slot_size(layout: Layout) -> int:
    return PAGE + -(-layout.size // PAGE) * PAGE


def _part(shared: mmap.mmap, layout: Layout, slot: int) -> Tensor:
    return torch.frombuffer(shared, dtype=torch.uint8, count=layout.size, offset=slot * _slot_size(layout) + PAGE)


def _write_stamp(shared: mmap.mmap, layout: Layout, slot: int, version: WeightVersion | None) -> None:
    STAMP.pack_into(shared, slot * _slot_size(layout), version is not None, *(version or (0, 0)))


def _read_stamp(shared: mmap.mmap, layout: Layout, slot: int) -> WeightVersion | None:
    written, step, incarnation = STAMP.unpack_from(shared, slot * _slot_size(layout))
    return WeightVersion(step, incarnation) if written else None
