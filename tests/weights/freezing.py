"""An embedded engine in a process of its own, of which a test may have one tensor stay behind."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from rollyard import hosts
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.remote import RemoteEngine
from rollyard.events import EngineId, Rollover
from rollyard.place.child import Child, launch
from rollyard.protocols.weights import Publisher
from rollyard.types import Completion, FinishReason, Request, WeightVersion
from tests.engine.embedded.serving import collect
from tests.weights.hosts import config

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@dataclass
class Freezing:
    """The engine `e0`, and what is sent to it."""

    child: Child
    engine: RemoteEngine
    publisher: Publisher

    async def freeze(self, name: str) -> None:
        """This tensor stays as it was first; none does with an empty name."""
        await self.child.call("freeze", name.encode(), limit_s=10.0)

    async def ask(self, _: EngineId, requests: Sequence[Request]) -> list[Completion]:
        self.engine.generate(requests)
        written = await collect(self.engine, len(requests))
        said = [(request.id.group, written[request.id]) for request in requests]
        return [
            Completion(group, 0, tuple(each.token_ids), tuple(each.logprobs), (), FinishReason.LENGTH, "") for group, each in said
        ]

    async def roll(self, version: WeightVersion) -> None:
        manifest = await self.publisher.publish(version, ("e0",))
        await self.engine.prepare(manifest)
        await self.publisher.deliver()
        await self.engine.pause(Rollover.DRAIN)
        await self.engine.load(version)
        self.publisher.taken("e0", version)
        await self.engine.resume()


@asynccontextmanager
async def freezing(folder: Path, publisher: Publisher) -> AsyncIterator[Freezing]:
    order = TypeAdapter(hosts.EngineOrder).dump_json(hosts.EngineOrder(config(transport="shared_memory"), "e0", folder))
    child = await launch("tests.weights.hosts:freezing", order, name="engine e0", environment=ENVIRONMENT)
    engine = RemoteEngine("e0", child, CAPABILITIES["embedded"], start_s=60.0, sync_s=60.0, drain_s=60.0)
    try:
        await engine.start()
        yield Freezing(child, engine, publisher)
    finally:
        await engine.close()
