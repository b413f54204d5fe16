"""Weights over the network: one flat buffer, broadcast in buckets from the trainer to all engines at once.

gloo between CPUs, NCCL between GPUs. The group is made for one set of engines and used as long as it works. Collectives
cannot be interrupted from inside: after a failure both sides leave the group, and the next offer makes a new one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from rollyard.errors import WeightSyncError
from rollyard.events import EngineId
from rollyard.model.folder import tensors
from rollyard.model.transformer import CausalLM
from rollyard.protocols import Device
from rollyard.types import Manifest, TensorInfo, WeightVersion
from rollyard.weights.flat import Prepared, check, fill, fingerprints, infos, model_infos, named, taken, views, whole
from rollyard.weights.layout import Layout, compare

dist: Any = torch.distributed  # its classes written in C++ have no types

BUCKET = 32 * 2**20  # bytes: long enough for the full rate, short enough that copying one hides behind sending another
COPY_S = 60.0  # seconds that copying up to the next bucket may take
BUFFERS = 2  # a receiver's: the engine may decode with views of one while the other is written


class BroadcastPublisher:
    """Rank 0 of the group. Sending runs on a thread, beside whatever the trainer does next; a copy is what is sent.

    Args:
        model: the policy, on a CPU or a GPU.
        device: where it is trained; a version is copied there, between two steps.
        address: of this machine, as engines reach it.
        limit_s: seconds one bucket may take.
    """

    def __init__(self, model: CausalLM, device: Device, address: str, limit_s: float) -> None:
        self._model, self._device, self._address, self._limit_s = model, device, address, limit_s
        self._layout = Layout.of(model_infos(model))
        self._buffer = torch.empty(self._layout.size, dtype=torch.uint8, device=model.head_weight.device)
        self._store: Any = None
        self._group: Group | None = None
        self._groups = 0
        self._sending: asyncio.Future[None] | None = None

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Begin to copy the parameters, and to send to `engines` what is copied. The device does nothing else meanwhile.

        Raises WeightSyncError when the last offer still goes.
        """
        if self._sending is not None and not self._sending.done():
            raise WeightSyncError(f"{named(version)} has to wait: the last version is still being sent")
        members = tuple(engines)
        if self._group is None or self._group.members != members:
            self._leave()
            self._groups += 1
        manifest = await self._device.run(self._offer, version, members)
        copied = Progress()
        copying = self._device.run(self._copy, copied)  # its turn comes before that of a next training step
        sending = asyncio.to_thread(self._send, version, members, copied)
        self._sending = asyncio.ensure_future(_both(copying, sending))
        return manifest

    async def deliver(self) -> None:
        """Raises WeightSyncError, naming the bucket, when an engine did not take part to the end."""
        if self._sending is not None:
            await self._sending

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """An engine has its own memory."""

    def lost(self, engine: EngineId) -> None:
        """The next offer makes a new group."""

    def close(self) -> None:
        self._leave()
        self._store = None

    def _offer(self, version: WeightVersion, members: tuple[EngineId, ...]) -> Manifest:
        parameters = whole(self._model, version)
        if self._store is None:
            # Port 0: the system chooses one that is free, and the store holds it.
            self._store = dist.TCPStore(
                self._address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=self._limit_s)
            )
        source = f"{self._address}:{self._store.port}/{self._groups}/{','.join(members)}"
        return Manifest(version, infos(parameters), self._layout.size, source, fingerprints(parameters))

    def _copy(self, copied: Progress) -> None:
        targets, parameters = views(self._buffer, self._layout), tensors(self._model)
        for place in self._layout.places:
            fill(targets, {place.info.name: parameters[place.info.name]})
            copied.reach(place.offset + place.size)
        copied.reach(self._layout.size)

    def _send(self, version: WeightVersion, members: tuple[EngineId, ...], copied: Progress) -> None:
        step = "before the first bucket"
        try:
            if self._group is None:
                assert self._store is not None
                self._group = Group(self._store, self._groups, members, 0, self._buffer.device, self._address, self._limit_s)
            for waited_for in self._group.broadcast(self._buffer, self._layout.buckets(BUCKET), copied):
                step = waited_for
        except (RuntimeError, ValueError) as error:
            self._leave()
            raise WeightSyncError(f"{named(version)} did not reach {', '.join(members)}, {step}: {_short(error)}") from error

    def _leave(self) -> None:
        self._group = None


class BroadcastReceiver:
    """One of the other ranks: its place among the engines of the offer.

    Args:
        engine: its id.
        expected: the engine's own tensors.
        device: where they are wanted.
        address: of this machine, as the trainer reaches it.
        limit_s: seconds one bucket may take.
    """

    def __init__(
        self, engine: EngineId, expected: Sequence[TensorInfo], device: torch.device, address: str, limit_s: float
    ) -> None:
        self._engine, self._expected, self._device = engine, expected, device
        self._address, self._limit_s = address, limit_s
        self._layout = Layout.of(expected)
        self._buffers: list[Tensor] = []
        self._turn = 0
        self._group: Group | None = None
        self._joined = ""
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None

    def prepare(self, manifest: Manifest) -> None:
        """Receive every bucket, and check. Raises WeightSyncError, naming the bucket; the group is left then."""
        compare(manifest.tensors, self._expected)
        layout = Layout.of(manifest.tensors)  # the sender's order
        with self._lock:
            self._prepared = None
            buffer = self._next()
            self._receive(manifest, buffer, layout.buckets(BUCKET))
            arrived = views(buffer, layout)
            check(manifest, arrived)
            self._prepared = manifest.version, arrived

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        """Raises WeightSyncError when another version was prepared."""
        return taken(self._prepared, version)

    def close(self) -> None:
        self._prepared = self._group = None
        self._buffers.clear()

    def _next(self) -> Tensor:
        """The buffer that the engine does not decode with."""
        self._turn = (self._turn + 1) % BUFFERS
        while len(self._buffers) < BUFFERS:
            self._buffers.append(torch.empty(self._layout.size, dtype=torch.uint8, device=self._device))
        return self._buffers[self._turn]

    def _receive(self, manifest: Manifest, buffer: Tensor, buckets: Sequence[tuple[int, int]]) -> None:
        step = "before the first bucket"
        try:
            for waited_for in self._join(manifest.source).broadcast(buffer, buckets):
                step = waited_for
        except (RuntimeError, ValueError) as error:
            self._group, self._joined = None, ""
            problem = f"{named(manifest.version)} did not reach {self._engine}, {step}: {_short(error)}"
            raise WeightSyncError(problem) from error

    def _join(self, source: str) -> Group:
        if self._group is None or self._joined != source:
            self._group = None  # the old one is left first
            where, number, names = source.split("/")
            host, _, port = where.rpartition(":")
            members = tuple(names.split(","))
            limit = timedelta(seconds=self._limit_s)
            store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)
            rank = members.index(self._engine) + 1
            self._group = Group(store, int(number), members, rank, self._device, self._address, self._limit_s)
            self._joined = source
        return self._group


class Group:
    """A process group of its own, outside torch's default one, which an engine's library may use for itself."""

    def __init__(
        self,
        store: Any,
        number: int,
        members: tuple[EngineId, ...],
        rank: int,
        device: torch.device,
        address: str,
        limit_s: float,
    ) -> None:
        self.members = members
        prefixed = dist.PrefixStore(f"weights-{number}", store)
        limit, size = timedelta(seconds=limit_s), len(members) + 1
        self._group: Any
        if device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(prefixed, rank, size, options)
        else:
            gloo = dist.ProcessGroupGloo._Options()
            gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
            gloo._timeout = limit
            self._group = dist.ProcessGroupGloo(prefixed, rank, size, gloo)

    def broadcast(self, buffer: Tensor, buckets: Sequence[tuple[int, int]], copied: Progress | None = None) -> Iterator[str]:
        """From rank 0 to all, every bucket on its way as soon as it is copied; `[bytes]` uint8. Says which is waited for.

        Raises RuntimeError when one of them does not take part in time.
        """
        going = []
        for start, end in buckets:
            if copied is not None:
                copied.wait(end)
            going.append(self._start(buffer[start:end]))
        for number, work in enumerate(going, start=1):
            yield f"at bucket {number} of {len(buckets)}"
            work.wait()

    def _start(self, bucket: Tensor) -> Any:
        return self._group.broadcast(bucket, 0)


class Progress:
    """How many bytes of a buffer are copied, told by one thread to another."""

    def __init__(self) -> None:
        self._bytes, self._changed = 0, threading.Condition()

    def reach(self, count: int) -> None:
        with self._changed:
            self._bytes = count
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Raises RuntimeError when the copy does not come so far."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._bytes >= count, COPY_S):
                raise RuntimeError("the parameters were not copied in time")


async def _both(copying: Awaitable[None], sending: Awaitable[None]) -> None:
    """What is under way is waited for, also when the other failed."""
    for outcome in await asyncio.gather(copying, sending, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _short(error: Exception) -> str:
    """torch's messages go on with stack traces."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
