"""What other processes of these tests run."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rollyard import hosts, worker
from rollyard.config import Config, EngineConfig, PlaceConfig, WeightsConfig
from rollyard.model.folder import load
from rollyard.place.inline import DeviceThread
from rollyard.protocols.processes import Channel
from rollyard.protocols.weights import Receiver
from rollyard.types import Manifest, WeightVersion
from rollyard.weights.broadcast import BroadcastPublisher
from rollyard.weights.checkpoint import CheckpointPublisher
from rollyard.weights.shared_memory import SharedMemoryPublisher
from rollyard.weights.source import OwnSource


def config(**weights: Any) -> Config:
    """Of a small engine in a process of its own."""
    return Config(
        engine=EngineConfig(slots=16, window=64, kernels="plain"),
        place=PlaceConfig(placement="separate", threads=1, device="cpu"),
        weights=WeightsConfig(**weights),
    )


class Freezing:
    """A receiver that keeps one tensor as it was first, whatever arrives."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver, self._first, self.frozen = receiver, dict[str, Tensor](), ""

    def prepare(self, manifest: Manifest) -> None:
        self._receiver.prepare(manifest)

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        arrived = dict(self._receiver.take(version) or {})
        if not self._first:
            self._first = {name: tensor.clone() for name, tensor in arrived.items()}
        return arrived | ({self.frozen: self._first[self.frozen]} if self.frozen else {})

    def close(self) -> None:
        self._receiver.close()


async def freezing(channel: Channel, order: bytes) -> None:
    """An engine; a call to "freeze" names the tensor that stays behind from then on."""
    build, made = worker.build_receiver, list[Freezing]()

    def wrapped(*args: Any) -> Freezing:
        made.append(Freezing(build(*args)))
        return made[0]

    async def freeze(content: bytes) -> bytes:
        made[0].frozen = content.decode()
        return b""

    worker.build_receiver = wrapped  # type: ignore[assignment]
    channel.handle("freeze", freeze)
    await hosts.serve_engine(channel, order)


def killed(folder: Path, scratch: Path) -> None:
    """Publish over everything there is, to an engine in a child of its own as well, and be killed."""
    asyncio.run(_killed(folder, scratch))


async def _killed(folder: Path, scratch: Path) -> None:
    model, device, version = load(folder), DeviceThread(), WeightVersion(0)
    engine = await hosts.launch_engine(config(transport="shared_memory"), "e0", folder)
    await engine.start()
    shared = SharedMemoryPublisher(OwnSource.of(model), device)
    others = [
        CheckpointPublisher(OwnSource.of(model), device, folder, scratch),
        BroadcastPublisher(OwnSource.of(model), device, "127.0.0.1", 30.0),
    ]
    for publisher in others:
        await publisher.publish(version, ("e0",))
    await engine.prepare(await shared.publish(version, ("e0",)))
    await engine.load(version)
    os.kill(os.getpid(), signal.SIGKILL)
