"""Weights over the network: one flat buffer, broadcast in buckets from the trainer to one engine of each machine at once.

gloo between CPUs, NCCL between GPUs. The group is made for one set of engines and used as long as it works. A bucket is on its
way as soon as it is filled. This is the trainer's side; the engines' is in `receive`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollyard.errors import ConfigError, WeightSyncError
from rollyard.events import EngineId
from rollyard.meeting import held_store
from rollyard.protocols.devices import Device
from rollyard.types import Activity, Manifest, Sent, WeightVersion
from rollyard.weights.delta import Bases, Frame, Scan
from rollyard.weights.flat import fill, marked, once_more, views
from rollyard.weights.group import Group, Meeting, Ready, on_thread, problem_of
from rollyard.weights.layout import TRAILER, Layout
from rollyard.weights.source import Source
from rollyard.weights.words import named

SHARE = 0.9  # of a sync's limit: where it stopped is told before the whole is given up


class BroadcastPublisher:
    """Rank 0 of the group. Sending runs on a thread, beside whatever the trainer does next; a copy is what is sent.

    Args:
        source: the tensors, on a CPU or a GPU.
        device: where they are changed; a version is copied there, between two steps.
        address: of this machine, as engines reach it.
        limit_s: seconds a sync may take; a bucket may take nine tenths of them.
        delta: only what changed travels to engines that have all the version before.
    """

    def __init__(self, source: Source, device: Device, address: str, limit_s: float, delta: bool = False) -> None:
        self._source, self._device, self._address, self._limit_s = source, device, address, SHARE * limit_s
        self._layout = Layout.with_trailer(source.infos)
        self._buffer = torch.zeros(self._layout.size, dtype=torch.uint8, device=source.where)
        self._holds: Manifest | None = None  # what all of the buffer is
        self._bases = Bases(delta)
        self._bytes = 0  # of what was sent last
        self._unchanged: float | None = None
        self._store: Any = None
        self._group: Group | None = None
        self._groups = self._offers = 0
        self._parted = False  # one of the group is gone, and another may have taken its name
        self._going: asyncio.Future[None] | None = None  # what copies and sends

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Begin to copy the tensors, and to send to `engines` what is copied. The device does nothing else meanwhile.

        An offer that still goes, if only because nobody waits for it any more, ends first: it has the buffer and the group.
        """
        parted = self._parted  # not if that is heard later: a line that is broken says so at once, a new group would wait
        await self._still()
        if parted:
            self._leave()
        loop, ready = asyncio.get_running_loop(), Ready()
        offered: asyncio.Future[Manifest] = loop.create_future()
        base = self._bases.of(self._holds, version, engines)

        def offer(manifest: Manifest) -> None:
            loop.call_soon_threadsafe(offered.set_result, manifest)

        copy = self._device.spans.timed(Activity.SYNC, self._copy, "publish")
        copying = asyncio.ensure_future(self._device.run(copy, version, base, ready, offer))
        self._goes(copying)
        first = (copying,) if self._source.shared else (offered, copying)  # ranks that share it hear here how it ended
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if copying.done():
            copying.result()
        return self._send_to(tuple(engines), self._bases.offer(await offered), ready, copying)

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        """Send what is in the buffer to these engines. Raises WeightSyncError when nothing was copied there whole.

        The group is a new one: that an engine left the old one shows only where something is still to be sent.
        """
        await self._still()
        self._leave()
        offered, self._unchanged = once_more(self._holds), None
        return self._send_to(tuple(engines), offered, Ready([None] * len(self._buckets)))

    async def deliver(self) -> Sent:
        """Raises WeightSyncError, naming the bucket, when an engine did not take part to the end."""
        if self._going is not None:
            await asyncio.wait((self._going,))  # whoever gives up waiting does not end it
            self._going.result()
        return Sent(self._bytes, self._unchanged)

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """An engine has its own memory."""
        self._bases.taken(engine, version)

    def lost(self, engine: EngineId) -> None:
        """The next offer is to others, for whom there is a new group."""
        self._bases.lost(engine)
        self._parted = True

    def close(self) -> None:
        self._leave()
        self._store = None

    @property
    def _buckets(self) -> tuple[tuple[int, int], ...]:
        return self._layout.buckets()

    async def _still(self) -> None:
        if self._going is not None:
            await asyncio.wait((self._going,))

    def _goes(self, going: asyncio.Future[None]) -> None:
        self._going = going
        going.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, if nobody asks

    def _copy(self, version: WeightVersion, base: str, ready: Ready, offer: Callable[[Manifest], None]) -> None:
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
        whole = Manifest(version, self._source.infos, self._layout.size, name=secrets.token_hex(8))
        self._holds = self._unchanged = None
        offer(replace(whole, base=base, bytes_copied=0 if base else whole.bytes_copied))
        try:
            scan = Scan(self._buffer, self._layout, self._buckets)
            frames = scan.frames(_trailed(each, found)) if base else self._filled(_trailed(each, found))
            for frame in frames:
                ready.put(frame)
            self._unchanged = scan.share if base else None
        finally:
            ready.stop()
        self._holds = whole

    def _filled(self, each: Iterable[tuple[str, Tensor]]) -> Iterator[Frame]:
        """Every bucket as it is, as soon as it is copied."""
        targets, left = views(self._buffer, self._layout), [end for _, end in self._buckets]
        for place, tensor in zip(self._layout.places, each, strict=True):
            fill(targets, (tensor,))
            del tensor  # before the next one comes
            while left and left[0] <= place.offset + place.size:
                left.pop(0)
                yield None
        yield from (None for _ in left)

    def _send_to(
        self,
        members: tuple[EngineId, ...],
        manifest: Manifest,
        ready: Ready,
        copying: asyncio.Future[None] | None = None,
    ) -> Manifest:
        """Begin to send: behind the copy, or all of the buffer when none is made."""
        if self._group is None or self._group.members != members:
            self._leave()
            self._groups += 1
        self._offers += 1
        send = self._device.spans.timed(Activity.SYNC, self._send, "deliver")
        sending = on_thread(send, manifest, members, ready)
        self._goes(sending if copying is None else asyncio.ensure_future(_both(copying, sending)))
        where = f"{self._address}:{self._store.port}"
        return replace(manifest, source=f"{where}/{self._groups}/{self._offers}/{','.join(members)}")

    def _send(self, manifest: Manifest, members: tuple[EngineId, ...], ready: Ready) -> None:
        delta, spans = bool(manifest.base), self._device.spans
        problem = problem_of(lambda: self._joined(members).send(self._buffer, self._buckets, ready, delta, spans))
        self._bytes = 0 if self._group is None else self._group.sent
        if problem:
            self._leave()
            raise WeightSyncError(f"{named(manifest.version)} did not reach {', '.join(members)}, {problem}")

    def _joined(self, members: tuple[EngineId, ...]) -> Group:
        if self._group is None:
            assert self._store is not None
            meeting = Meeting(self._store, self._groups, members, self._buffer.device, self._limit_s)
            self._group = Group(meeting, None, self._address)
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._parted = None, False


def _trailed(each: Iterable[tuple[str, Tensor]], found: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """The tensors, and when all have gone by, their fingerprints."""
    yield from each
    yield TRAILER, torch.tensor(found, dtype=torch.int64).view(torch.uint8)


async def _both(copying: Awaitable[None], sending: Awaitable[None]) -> None:
    """What is under way is waited for, also when the other failed."""
    for outcome in await asyncio.gather(copying, sending, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
