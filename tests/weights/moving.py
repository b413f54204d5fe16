"""A publisher and its receivers, of any transport that moves bytes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rollyard.errors import WeightSyncError
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.protocols.weights import Publisher, Receiver
from rollyard.types import Manifest, WeightVersion
from rollyard.weights.broadcast import BroadcastPublisher
from rollyard.weights.checkpoint import CheckpointPublisher, CheckpointReceiver
from rollyard.weights.flat import model_infos, views
from rollyard.weights.group import Group
from rollyard.weights.layout import TRAILER, Layout
from rollyard.weights.receive import BroadcastReceiver
from rollyard.weights.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from rollyard.weights.slot import Slot
from rollyard.weights.source import OwnSource

WHOLE = ("checkpoint", "shared_memory", "broadcast", "relay")
SHARE = 0.02  # of the numbers, that change in most steps
MOVING = (*WHOLE, *(f"{kind} delta" for kind in WHOLE))
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
    apart = True  # as if on a machine of its own

    def _place(self, address: str) -> str:
        return uuid.uuid4().hex if self.apart else super()._place(address)

    def _receive_into(self, manifest: Manifest, group: Group) -> Slot:
        slot = super()._receive_into(manifest, group)
        if self.spoils:
            views(slot.tensor, Layout.with_trailer(manifest.tensors))[TRAILER].view(torch.int64)[-1] += 1
            self.spoils = False
        return slot


def spoilt(manifest: Manifest, *receivers: Receiver) -> Manifest:
    """What they are to prepare, so that the last tensor is another than was sent."""
    for one in receivers:
        if isinstance(one, Spoiling):
            one.spoils = True
    return replace(manifest, fingerprints=(*manifest.fingerprints[:-1], sum(manifest.fingerprints[-1:]) + 1))


def receiver(kind: str, model: CausalLM, engine: str, limit_s: float = 20.0) -> Receiver:
    kind, _, delta = kind.partition(" ")
    if kind == "checkpoint":
        return CheckpointReceiver(model_infos(model), CPU, bool(delta))
    if kind == "shared_memory":
        return SharedMemoryReceiver(model_infos(model), CPU)
    made = Spoiling(engine, model_infos(model), CPU, limit_s)
    made.apart = kind != "relay"
    return made


@asynccontextmanager
async def sides(kind: str, model: CausalLM, folder: Path, engines: int = 1, limit_s: float = 20.0) -> AsyncIterator[Sides]:
    device, delta = DeviceThread(), kind.endswith(" delta")
    publisher: Publisher
    if kind.startswith("checkpoint"):
        publisher = CheckpointPublisher(OwnSource.of(model), device, folder, folder.parent / "scratch", delta)
    elif kind.startswith("shared_memory"):
        publisher = SharedMemoryPublisher(OwnSource.of(model), device, delta=delta)
    else:
        publisher = BroadcastPublisher(OwnSource.of(model), device, LOCAL, limit_s, delta)
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
    """What a trainer does: each third time every number changes, else a few of each parameter. Returns copies of them."""
    generator = torch.Generator().manual_seed(seed)
    with model.stamp.writing():
        for parameter in model.parameters():
            change = torch.empty(parameter.shape).normal_(0, 0.1, generator=generator)
            if seed % 3:
                change.view(-1)[1:][torch.rand(parameter.numel() - 1, generator=generator) > SHARE] = 0.0
            parameter.add_(change.to(parameter.dtype))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
