"""A rank other than 0 of a trainer whose model is shared: it takes part in what rank 0 publishes, and keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.errors import WeightSyncError
from rollyard.events import EngineId
from rollyard.model.shards import exhaust
from rollyard.protocols.devices import Device
from rollyard.types import Activity, Manifest, WeightVersion
from rollyard.weights.source import Source


class PartPublisher:
    """Implements `protocols.Publisher` as far as another rank has to.

    Args:
        source: this rank's parts of the tensors.
        device: on which all ranks do the same.
    """

    def __init__(self, source: Source, device: Device) -> None:
        self._source, self._device = source, device

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Bring rank 0 what it needs of every tensor. What is on offer, rank 0 says."""
        await self._device.run(self._device.spans.timed(Activity.SYNC, self._publish, "publish"), version)
        return Manifest(version, (), bytes_copied=0)

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        raise WeightSyncError("nothing that was offered is on this rank")

    async def deliver(self) -> None:
        """Nothing is on its way from here."""

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        """Nothing is mapped."""

    def lost(self, engine: EngineId) -> None:
        """Nothing is mapped."""

    def close(self) -> None:
        """Nothing to give back."""

    def _publish(self, version: WeightVersion) -> None:
        exhaust(self._source.each(version))
