"""Weights over the network: one flat buffer, broadcast in buckets from the trainer to all engines at once.

gloo between CPUs, NCCL between GPUs. The group is made for one set of engines and used as long as it works. Collectives
cannot be interrupted from inside: after a failure both sides leave the group, and the next offer makes a new one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollyard.errors import ConfigError, WeightSyncError
from rollyard.events import EngineId
from rollyard.meeting import held_store, new_group, own_address, store_at
from rollyard.protocols import Device
from rollyard.types import Activity, Manifest, TensorInfo, WeightVersion
from rollyard.weights.flat import Prepared, check, fill, marked, once_more, taken, views
from rollyard.weights.layout import TRAILER, Layout, compare
from rollyard.weights.source import Source
from rollyard.weights.words import named

BUCKET = 32 * 2**20  # bytes: long enough for the full rate, short enough that copying one hides behind sending another
SHARE = 0.9  # of a sync's limit: where it stopped is told before the whole is given up
COPY_S = 60.0  # seconds that copying up to the next bucket may take
BUFFERS = 2  # an engine's: it may decode with views of one while the other is written


class BroadcastPublisher:
    """Rank 0 of the group. Sending runs on a thread, beside whatever the trainer does next; a copy is what is sent.

    Args:
        source: the tensors, on a CPU or a GPU.
        device: where they are changed; a version is copied there, between two steps.
        address: of this machine, as engines reach it.
        limit_s: seconds a sync may take; a bucket may take nine tenths of them.
    """

    def __init__(self, source: Source, device: Device, address: str, limit_s: float) -> None:
        self._source, self._device, self._address, self._limit_s = source, device, address, SHARE * limit_s
        self._layout = Layout.with_trailer(source.infos)
        self._buffer = torch.empty(self._layout.size, dtype=torch.uint8, device=source.where)
        self._holds: Manifest | None = None  # what all of the buffer is
        self._store: Any = None
        self._group: Group | None = None
        self._groups = 0
        self._going: asyncio.Future[None] | None = None  # what copies and sends

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Begin to copy the tensors, and to send to `engines` what is copied. The device does nothing else meanwhile.

        An offer that still goes, if only because nobody waits for it any more, ends first: it has the buffer and the group.
        """
        await self._still()
        loop, copied = asyncio.get_running_loop(), Progress()
        offered: asyncio.Future[Manifest] = loop.create_future()

        def offer(manifest: Manifest) -> None:
            loop.call_soon_threadsafe(offered.set_result, manifest)

        copy = self._device.spans.timed(Activity.SYNC, self._copy, "publish")
        copying = asyncio.ensure_future(self._device.run(copy, version, copied, offer))
        self._goes(copying)
        await asyncio.wait((offered, copying), return_when=asyncio.FIRST_COMPLETED)
        if copying.done():
            copying.result()
        return self._send_to(tuple(engines), await offered, copied, copying)

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        """Send what is in the buffer to these engines. Raises WeightSyncError when nothing was copied there whole."""
        await self._still()
        return self._send_to(tuple(engines), once_more(self._holds))

    async def deliver(self) -> None:
        """Raises WeightSyncError, naming the bucket, when an engine did not take part to the end."""
        if self._going is not None:
            await asyncio.wait((self._going,))  # whoever gives up waiting does not end it
            self._going.result()

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """An engine has its own memory."""

    def lost(self, engine: EngineId) -> None:
        """The next offer makes a new group."""

    def close(self) -> None:
        self._leave()
        self._store = None

    async def _still(self) -> None:
        if self._going is not None:
            await asyncio.wait((self._going,))

    def _goes(self, going: asyncio.Future[None]) -> None:
        self._going = going
        going.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, if nobody asks

    def _copy(self, version: WeightVersion, copied: Progress, offer: Callable[[Manifest], None]) -> None:
        """One call on the device: nobody can change a tensor between what is offered and the end of the copy."""
        found = list[int]()
        each = marked(self._source.each(version), found)
        if self._store is None:
            try:
                self._store = held_store(self._address, self._limit_s)
            except OSError as error:
                remedy = "give an address of the trainer's machine"
                problem = f"engines cannot meet at {self._address}: {error}"
                raise ConfigError(problem, where="weights.address", remedy=remedy) from error
        manifest = Manifest(version, self._source.infos, self._layout.size)
        self._holds = None
        offer(manifest)
        targets = views(self._buffer, self._layout)
        for place, tensor in zip(self._layout.places[:-1], each, strict=True):
            fill(targets, (tensor,))
            del tensor  # before the next one comes
            copied.reach(place.offset + place.size)
        fill(targets, ((TRAILER, torch.tensor(found, dtype=torch.int64).view(torch.uint8)),))
        copied.reach(self._layout.size)
        self._holds = manifest

    def _send_to(
        self,
        members: tuple[EngineId, ...],
        manifest: Manifest,
        copied: Progress | None = None,
        copying: asyncio.Future[None] | None = None,
    ) -> Manifest:
        """Begin to send: behind the copy, or all of the buffer when none is made."""
        if self._group is None or self._group.members != members:
            self._leave()
            self._groups += 1
        send = self._device.spans.timed(Activity.SYNC, self._send, "deliver")
        sending = _on_thread(send, manifest.version, members, copied)
        self._goes(sending if copying is None else asyncio.ensure_future(_both(copying, sending)))
        return replace(manifest, source=f"{self._address}:{self._store.port}/{self._groups}/{','.join(members)}")

    def _send(self, version: WeightVersion, members: tuple[EngineId, ...], copied: Progress | None) -> None:
        problem = _problem(lambda: self._joined(members).broadcast(self._buffer, self._layout.buckets(BUCKET), copied))
        if problem:
            self._leave()
            raise WeightSyncError(f"{named(version)} did not reach {', '.join(members)}, {problem}")

    def _joined(self, members: tuple[EngineId, ...]) -> Group:
        if self._group is None:
            assert self._store is not None
            self._group = Group(self._store, self._groups, members, 0, self._buffer.device, self._address, self._limit_s)
        return self._group

    def _leave(self) -> None:
        self._group = None


class BroadcastReceiver:
    """One of the other ranks: its place among the engines of the offer.

    Args:
        engine: its id.
        expected: the engine's own tensors.
        device: where they are wanted.
        limit_s: seconds a sync may take; a bucket may take nine tenths of them.
        buffers: one is enough where what is taken is copied before the next offer.
    """

    def __init__(
        self, engine: EngineId, expected: Sequence[TensorInfo], device: torch.device, limit_s: float, buffers: int = BUFFERS
    ) -> None:
        self._engine, self._expected, self._device, self._limit_s = engine, expected, device, SHARE * limit_s
        self._layout, self._count = Layout.with_trailer(expected), buffers
        self._buffers: list[Tensor] = []
        self._filled, self._held = 0, 1  # buffers: of the last offer, and of what was taken last
        self._group: Group | None = None
        self._source = ""
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None

    def prepare(self, manifest: Manifest) -> None:
        """Receive every bucket, and check. Raises WeightSyncError, naming the bucket; the group is left then."""
        compare(manifest.tensors, self._expected)
        layout = Layout.with_trailer(manifest.tensors)  # the sender's order
        with self._lock:
            self._prepared = None
            buffer = self._next()
            self._receive(manifest, buffer, layout.buckets(BUCKET))
            arrived = views(buffer, layout)
            check(manifest, arrived, arrived.pop(TRAILER).view(torch.int64).tolist())
            self._prepared = manifest.version, arrived

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        """Raises WeightSyncError when another version was prepared."""
        tensors_ = taken(self._prepared, version)
        self._held = self._filled
        return tensors_

    def close(self) -> None:
        self._prepared = self._group = None
        self._buffers.clear()

    def _next(self) -> Tensor:
        """The buffer that the engine does not decode with, whatever became of earlier offers."""
        self._filled = (self._held + 1) % self._count
        while len(self._buffers) < self._count:
            self._buffers.append(torch.empty(self._layout.size, dtype=torch.uint8, device=self._device))
        return self._buffers[self._filled]

    def _receive(self, manifest: Manifest, buffer: Tensor, buckets: Sequence[tuple[int, int]]) -> None:
        problem = _problem(lambda: self._joined(manifest.source).broadcast(buffer, buckets))
        if problem:
            self._group, self._source = None, ""
            raise WeightSyncError(f"{named(manifest.version)} did not reach {self._engine}, {problem}")

    def _joined(self, source: str) -> Group:
        if self._group is None or self._source != source:
            self._group = None  # the old one is left first
            where, number, names = source.split("/")
            host, _, port = where.rpartition(":")
            members = tuple(names.split(","))
            store = store_at(host, int(port), self._limit_s)
            rank, own = members.index(self._engine) + 1, own_address(host, int(port))
            self._group = Group(store, int(number), members, rank, self._device, own, self._limit_s)
            self._source = source
        return self._group


class Group:
    """The trainer and the engines of one offer."""

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
        self._group = new_group(store, f"weights-{number}", rank, len(members) + 1, device, address, limit_s)

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


def _on_thread(call: Callable[..., None], *args: Any) -> asyncio.Future[None]:
    """Run `call(*args)` on a thread that the process does not wait for when it ends: nobody can interrupt a collective."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def work() -> None:
        failed: Exception | None = None
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 (told to whoever waits)
            failed = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, failed)

    threading.Thread(target=work, name="weights", daemon=True).start()
    return done


def _problem(broadcasting: Callable[[], Iterator[str]]) -> str:
    """Where a broadcast stopped, and why; empty when it went through.

    Words only: an exception would keep the group alive, and with it the lines by which the others see that we have left.
    """
    step = "before the first bucket"
    try:
        for waited_for in broadcasting():
            step = waited_for
    except (RuntimeError, ValueError, OSError) as error:
        return f"{step}: {_short(error)}"
    return ""


def _short(error: Exception) -> str:
    """torch's messages go on with stack traces."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
