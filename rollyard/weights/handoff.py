"""A trainer's whole state from one process to another: parameters, moments, random state.

It travels as weights do, by any publisher and receiver that move bytes. Nothing is replaced before all of it has come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from torch import Tensor

from rollyard.protocols import Device, Handoff, Publisher, Receiver
from rollyard.types import Handed, Manifest, WeightVersion
from rollyard.weights.flat import fill, replacing
from rollyard.weights.layout import Layout
from rollyard.weights.source import Source

Settle = Callable[[WeightVersion, Mapping[str, Tensor]], None]


def nothing_more(version: WeightVersion, tensors: Mapping[str, Tensor]) -> None:
    """The tensors are all there is."""


class StateHandoff:
    """One side, which gives and takes in turn (protocols.Handoff).

    Args:
        state: what is given, and replaced when one is taken.
        device: where it is changed; it is copied out and in there, between two steps.
        publisher: of `state`.
        receiver: of what the other side has; it expects the tensors of `state`.
        settle: called inside the change with the tensors of `state`, as they are now: for the version, and for what those
            tensors are only copies of, such as a random state. When it fails the state is torn.
    """

    def __init__(
        self, state: Source, device: Device, publisher: Publisher, receiver: Receiver, settle: Settle = nothing_more
    ) -> None:
        self._state, self._device, self._settle = state, device, settle
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
            await asyncio.to_thread(self._receiver.prepare, manifest)
            await self._device.run(self._replace, manifest.version)
            size = sum(place.size for place in Layout.of(manifest.tensors).places)
            return Handed(size, time.perf_counter() - began)

    def close(self) -> None:
        self._receiver.close()
        self._publisher.close()

    def _replace(self, version: WeightVersion) -> None:
        arrived, targets = self._receiver.take(version), self._state.now()
        assert arrived is not None, "a state does not travel in place"
        with replacing(self._state.stamp):
            fill(targets, arrived)
            self._settle(version, targets)


async def hand_over(giving: Handoff, taking: Handoff, version: WeightVersion, to: str) -> Handed:
    """Both sides at once. Raises WeightSyncError when either fails, once neither is at it any more.

    Args:
        to: the name of the side that takes.
    """
    manifest = await giving.give(version, to)
    handed, given = await asyncio.gather(taking.take(manifest), giving.given(), return_exceptions=True)
    for outcome in (handed, given):
        if isinstance(outcome, BaseException):
            raise outcome
    assert isinstance(handed, Handed)
    return handed
