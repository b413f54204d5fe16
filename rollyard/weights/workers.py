"""The trainer's side for engines that are several workers each: a worker is to the transport what an engine is otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollyard.events import EngineId
from rollyard.model.architecture import Architecture
from rollyard.protocols.weights import Publisher
from rollyard.types import Manifest, Sent, WeightVersion
from rollyard.weights.shares import shares, worker_name


class WorkersPublisher:
    """Implements `protocols.Publisher`; its manifests say which worker needs what.

    Args:
        publisher: of the transport; closed with this one.
        shape: of the model.
        workers: of each engine.
    """

    def __init__(self, publisher: Publisher, shape: Architecture, workers: int) -> None:
        self._publisher, self._shape, self._workers = publisher, shape, workers

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        return self._shared(await self._publisher.publish(version, self._names(engines)))

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        return self._shared(await self._publisher.again(self._names(engines)))

    async def deliver(self) -> Sent | None:
        return await self._publisher.deliver()

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        for name in self._names([engine]):
            self._publisher.taken(name, version)

    def lost(self, engine: EngineId) -> None:
        """With all of its workers."""
        for name in self._names([engine]):
            self._publisher.lost(name)

    def close(self) -> None:
        self._publisher.close()

    def _names(self, engines: Sequence[EngineId]) -> list[str]:
        return [worker_name(engine, rank) for engine in engines for rank in range(self._workers)]

    def _shared(self, manifest: Manifest) -> Manifest:
        return replace(manifest, shares=shares(manifest.tensors, self._shape, self._workers))
