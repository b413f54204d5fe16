"""The engines' side of a broadcast: one engine of a machine receives, the others there map what it received.

Memory is in slots. A slot is written while no engine of the machine decodes with what is in it, or prepared to; there are
more than two only while engines are at different versions.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rollyard.errors import RollyardError, WeightSyncError
from rollyard.events import EngineId
from rollyard.meeting import own_address, store_at
from rollyard.protocols.devices import Spans
from rollyard.types import Manifest, TensorInfo, WeightVersion
from rollyard.weights import broadcast, relay
from rollyard.weights.delta import Changes, Frame, apply, catch_up
from rollyard.weights.flat import Prepared, check, taken, views
from rollyard.weights.group import Group, Meeting, problem_of
from rollyard.weights.kept import Kept
from rollyard.weights.layout import TRAILER, Layout, compare
from rollyard.weights.relay import Word
from rollyard.weights.slot import Lent, Slot
from rollyard.weights.words import named

BUFFERS = 2  # an engine's: it may decode with views of one while the other is written


class BroadcastReceiver:
    """One of the other ranks, or one who has its tensors from that of the same machine.

    Args:
        engine: its id.
        expected: the engine's own tensors.
        device: where they are wanted.
        limit_s: seconds a sync may take; a bucket may take nine tenths of them.
        buffers: one is enough where what is taken is copied before the next offer.
        spans: where the time of each bucket is kept.
    """

    def __init__(
        self,
        engine: EngineId,
        expected: Sequence[TensorInfo],
        device: torch.device,
        limit_s: float,
        buffers: int = BUFFERS,
        spans: Spans | None = None,
    ) -> None:
        self._engine, self._expected, self._device, self._limit_s = engine, expected, device, broadcast.SHARE * limit_s
        self._kept, self._spans = Kept(engine, Layout.with_trailer(expected).size, buffers), spans
        self._lent: list[Lent] = []  # of others, mapped once and used again
        self._group: Group | None = None
        self._source = ""
        self._lock = threading.Lock()
        self._prepared: Prepared | None = None

    def prepare(self, manifest: Manifest) -> None:
        """Receive every bucket, and check. Raises WeightSyncError, naming the bucket; the group is left then."""
        where, number, offer, names = manifest.source.split("/")
        compare(manifest.tensors, self._expected)
        with self._lock:
            self._prepared = None
            self._kept.fill(None)
            self._purge()
            group = self._joined(manifest.version, where, int(number), tuple(names.split(",")))
            try:
                slot = self._borrow(manifest, group, int(offer)) if group.reader else self._receive_into(manifest, group)
                arrived = views(slot.tensor, Layout.with_trailer(manifest.tensors))
                check(manifest, arrived, arrived.pop(TRAILER).view(torch.int64).tolist())
            except RollyardError as error:
                if group.board is not None:
                    group.board.tell(Word(int(offer), "", str(error)))
                if group.broken:
                    self._leave()
                raise
            if isinstance(slot, Slot):
                slot.end(manifest.name)
            if group.board is not None:
                group.board.tell(Word(int(offer), slot.path))
            if group.device != self._device:
                arrived = {name: tensor.to(self._device) for name, tensor in arrived.items()}
            self._kept.fill(slot)
            self._prepared = manifest.version, arrived

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        """Raises WeightSyncError when another version was prepared."""
        tensors_ = taken(self._prepared, version)
        self._kept.take()
        return tensors_

    def close(self) -> None:
        self._leave()
        self._prepared = None
        self._kept.close()
        for lent in self._lent:
            lent.close()
        self._lent.clear()

    # ------------------------------------------------------------------------------------- from the trainer

    def _receive_into(self, manifest: Manifest, group: Group) -> Slot:
        try:
            base = self._kept.base(manifest.base) if manifest.base else None
            slot, holds = self._kept.begin(group.device)
        except (RollyardError, RuntimeError) as error:  # torch's own when a GPU is full
            group.broken = True  # the others are told by that we leave
            raise WeightSyncError(f"{named(manifest.version)} did not reach {self._engine}: {error}") from error
        buckets = Layout.with_trailer(manifest.tensors).buckets()  # the sender's order
        if base is None:
            self._kept.last = Changes()
            self._receive(manifest, group, slot.tensor, buckets)
        else:
            self._kept.last = self._receive_changed(manifest, group, slot.tensor, holds, base, buckets)
        return slot

    def _receive(self, manifest: Manifest, group: Group, buffer: Tensor, buckets: Sequence[tuple[int, int]]) -> None:
        problem = problem_of(lambda: group.receive(buffer, buckets, self._spans))
        if problem:
            group.broken = True
            raise WeightSyncError(f"{named(manifest.version)} did not reach {self._engine}, {problem}")

    def _receive_changed(
        self,
        manifest: Manifest,
        group: Group,
        buffer: Tensor,
        holds: str,
        base: Slot | Lent,
        buckets: Sequence[tuple[int, int]],
    ) -> Changes:
        """All of it is received, also when some of it is not what was sent: the trainer could not tell us from one that died."""
        frames: list[Frame] = [None] * len(buckets)
        broken: list[WeightSyncError] = []

        def before(number: int, bucket: Tensor) -> None:
            start, end = buckets[number]
            catch_up(number, bucket, holds, base.tensor[start:end], manifest.base, self._kept.last)

        def then(number: int, bucket: Tensor, frame: Tensor) -> None:
            frames[number] = frame
            try:
                apply(frame, bucket, number + 1)
            except WeightSyncError as error:
                broken.append(error)

        problem = problem_of(lambda: group.receive_changed(buffer, buckets, self._spans, before, then))
        if problem:
            group.broken = True
            raise WeightSyncError(f"{named(manifest.version)} did not reach {self._engine}, {problem}")
        if broken:
            raise broken[0]
        return Changes(manifest.base, manifest.name, tuple(frames))

    # -------------------------------------------------------------------------- from another engine of the machine

    def _borrow(self, manifest: Manifest, group: Group, offer: int) -> Lent:
        assert group.reader is not None
        try:
            word = group.reader.wait(offer)
        except RuntimeError as error:
            group.broken = True
            raise WeightSyncError(f"{named(manifest.version)} did not reach {self._engine}: {error}") from error
        if word.problem:
            owner = group.reader.owner
            problem = f"{owner}, which receives for this machine, failed: {word.problem}"
            raise WeightSyncError(f"{named(manifest.version)} did not reach {self._engine}: {problem}")
        lent = next((lent for lent in self._lent if lent.path == word.path and lent.still), None)
        if lent is None:
            lent = Lent(word.path)
            self._lent.append(lent)
        lent.use(manifest.name)
        return lent

    def _purge(self) -> None:
        """Let go of memory whose owner is gone, unless the engine decodes with it."""
        for gone in [lent for lent in self._lent if not self._kept.uses(lent) and not lent.still]:
            self._lent.remove(gone)
            gone.close()

    # --------------------------------------------------------------------------------------------- the group

    def _joined(self, version: WeightVersion, where: str, number: int, members: tuple[EngineId, ...]) -> Group:
        if self._group is None or self._source != f"{where}/{number}":
            self._leave()  # the old one is left first
            problem = problem_of(lambda: self._join(where, number, members))
            if problem:
                self._leave()
                raise WeightSyncError(f"{named(version)} did not reach {self._engine}, {problem}")
        assert self._group is not None
        return self._group

    def _join(self, where: str, number: int, members: tuple[EngineId, ...]) -> Iterator[str]:
        host, _, port = where.rpartition(":")
        store = store_at(host, int(port), self._limit_s)
        meeting = Meeting(store, number, members, self._device, self._limit_s)
        address = own_address(host, int(port))
        self._group = Group(meeting, self._engine, address, self._place(address))
        self._source = f"{where}/{number}"
        return iter(())

    def _place(self, address: str) -> str:
        return relay.here(address)

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._source = None, ""
