"""A trainer's whole state from one process to another: parameters, moments, random state.

It travels as weights do, by any publisher and receiver that move bytes. Nothing is replaced before all of it has come.
"""

from __future__ import annotations

import asyncio
import time

from rollyard.protocols.devices import Device
from rollyard.protocols.weights import Publisher, Receiver
from rollyard.types import Activity, Handed, Manifest, WeightVersion
from rollyard.weights.flat import fill, replacing
from rollyard.weights.layout import Layout
from rollyard.weights.source import Source


class StateHandoff:
    """One side, which gives and takes in turn (protocols.Handoff).

    Args:
        state: what is given, and written when one is taken. Its tensors are asked for once before either.
        device: where it is changed; it is copied out and in there, between two steps.
        publisher: of `state`.
        receiver: of what the other side has; it expects the tensors of `state`.
    """

    def __init__(self, state: Source, device: Device, publisher: Publisher, receiver: Receiver) -> None:
        self._state, self._device = state, device
        self._publisher, self._receiver = publisher, receiver
        self._turn = asyncio.Lock()

    async def give(self, version: WeightVersion, to: str) -> Manifest:
        """Once it returns, what is done on the device next may change the state. Raises WeightSyncError."""
        return await self._publisher.publish(version, (to,))

    async def given(self) -> None:
        await self._publisher.deliver()

    async def take(self, manifest: Manifest) -> Handed:
        """Receive and check it, on a thread of its own; then copy it in. Raises WeightSyncError, with the state as it was."""
        async with self._turn:  # whoever gave up waiting for another did not end it
            began = time.perf_counter()
            spans = self._device.spans
            await asyncio.to_thread(spans.timed(Activity.SYNC, self._receiver.prepare, "handoff"), manifest)
            await self._device.run(spans.timed(Activity.SYNC, self._replace, "handoff"), manifest.version)
            size = sum(place.size for place in Layout.of(manifest.tensors).places)
            return Handed(size, time.perf_counter() - began)

    def close(self) -> None:
        self._receiver.close()
        self._publisher.close()

    def _replace(self, version: WeightVersion) -> None:
        arrived, targets = self._receiver.take(version), self._state.now()
        assert arrived is not None, "a state does not travel in place"
        with replacing(self._state.stamp):
            fill(targets, arrived.items())
