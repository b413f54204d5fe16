"""A publisher and its receivers, of any transport that moves bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rollyard.errors import WeightSyncError
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.protocols import Publisher, Receiver
from rollyard.types import Manifest, WeightVersion
from rollyard.weights.broadcast import BroadcastPublisher, BroadcastReceiver
from rollyard.weights.checkpoint import CheckpointPublisher, CheckpointReceiver
from rollyard.weights.flat import model_infos, views
from rollyard.weights.layout import TRAILER, Layout
from rollyard.weights.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from rollyard.weights.source import Source

MOVING = ("checkpoint", "shared_memory", "broadcast")
LOCAL, CPU = "127.0.0.1", torch.device("cpu")


@dataclass
class Sides:
    publisher: Publisher
    receivers: dict[str, Receiver]
    device: DeviceThread

    async def send(self, step: int) -> Manifest:
        """Publish, and have every receiver prepare. Raises what any side raises."""
        manifest = await self.publisher.publish(WeightVersion(step), sorted(self.receivers))
        preparing = [asyncio.to_thread(receiver.prepare, manifest) for receiver in self.receivers.values()]
        outcomes = await asyncio.gather(self.publisher.deliver(), *preparing, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return manifest

    async def try_(self, step: int, spoil: bool) -> bool:
        """The same; `spoil`: what arrives is not what was sent. Whether it was prepared."""
        manifest = await self.publisher.publish(WeightVersion(step), sorted(self.receivers))
        if spoil:
            manifest = spoilt(manifest, *self.receivers.values())
        preparing = [asyncio.to_thread(receiver.prepare, manifest) for receiver in self.receivers.values()]
        outcomes = await asyncio.gather(self.publisher.deliver(), *preparing, return_exceptions=True)
        assert spoil == any(isinstance(outcome, WeightSyncError) for outcome in outcomes)
        return not spoil

    def taken(self, step: int) -> None:
        for engine in self.receivers:
            self.publisher.taken(engine, WeightVersion(step))


class Spoiling(BroadcastReceiver):
    """Fingerprints come behind the tensors: the last one changes on the way of the next offer."""

    spoils = False

    def _receive(self, manifest: Manifest, buffer: torch.Tensor, buckets: Sequence[tuple[int, int]]) -> None:
        super()._receive(manifest, buffer, buckets)
        if self.spoils:
            views(buffer, Layout.with_trailer(manifest.tensors))[TRAILER].view(torch.int64)[-1] += 1
            self.spoils = False


def spoilt(manifest: Manifest, *receivers: Receiver) -> Manifest:
    """What they are to prepare, so that the last tensor is another than was sent."""
    for one in receivers:
        if isinstance(one, Spoiling):
            one.spoils = True
    return replace(manifest, fingerprints=(*manifest.fingerprints[:-1], sum(manifest.fingerprints[-1:]) + 1))


def receiver(kind: str, model: CausalLM, engine: str, limit_s: float = 20.0) -> Receiver:
    if kind == "checkpoint":
        return CheckpointReceiver(model_infos(model), CPU)
    if kind == "shared_memory":
        return SharedMemoryReceiver(model_infos(model), CPU)
    return Spoiling(engine, model_infos(model), CPU, limit_s)


@asynccontextmanager
async def sides(kind: str, model: CausalLM, folder: Path, engines: int = 1, limit_s: float = 20.0) -> AsyncIterator[Sides]:
    device = DeviceThread()
    publisher: Publisher
    if kind == "checkpoint":
        publisher = CheckpointPublisher(Source.of(model), device, folder, folder.parent / "scratch")
    elif kind == "shared_memory":
        publisher = SharedMemoryPublisher(Source.of(model), device)
    else:
        publisher = BroadcastPublisher(Source.of(model), device, LOCAL, limit_s)
    receivers = {f"e{number}": receiver(kind, model, f"e{number}", limit_s) for number in range(engines)}
    try:
        yield Sides(publisher, receivers, device)
    finally:
        for one in receivers.values():
            one.close()
        publisher.close()
        device.close()


@torch.no_grad()
def step(model: CausalLM, seed: int) -> dict[str, torch.Tensor]:
    """What a trainer does: every parameter changes. Returns copies of the new ones."""
    generator = torch.Generator().manual_seed(seed)
    with model.stamp.writing():
        for parameter in model.parameters():
            parameter.add_(torch.empty(parameter.shape).normal_(0, 0.1, generator=generator).to(parameter.dtype))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
