"""Engines in a child whose receivers hand out what they should not: once a tensor that does not fit, or always an old one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from rollyard import hosts
from rollyard.engine.host import serve as serve_engine
from rollyard.engine.vllm.engine import VllmEngine
from rollyard.model.architecture import Architecture
from rollyard.protocols.processes import Channel
from rollyard.protocols.weights import Receiver
from rollyard.types import Manifest, WeightVersion
from tests.weights.hosts import Freezing

BAD = 66  # the step whose tensors do not fit


class Breaking:
    """Wraps a receiver."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def prepare(self, manifest: Manifest) -> None:
        self._receiver.prepare(manifest)

    def take(self, version: WeightVersion) -> Mapping[str, Tensor] | None:
        taken = self._receiver.take(version)
        if version.step != BAD or taken is None:
            return taken
        middle = list(taken)[len(taken) // 2]
        return {**taken, middle: taken[middle].flatten()[:-1]}

    def close(self) -> None:
        self._receiver.close()


def breaking(order: str, device: torch.device, rank: int) -> Receiver:
    return Breaking(hosts.vllm_receiver(order, device, rank))


class Told(Freezing):
    """Keeps the tensor that a file beside the model names: vLLM's worker has no line to the test."""

    def __init__(self, receiver: Receiver, told: Path) -> None:
        super().__init__(receiver)
        self._told = told

    def take(self, version: WeightVersion) -> Mapping[str, Tensor]:
        self.frozen = self._told.read_text() if self._told.exists() else ""
        return super().take(version)


def told(folder: Path, rank: int = 0) -> Path:
    """The file that names the tensor which stays behind in the worker of this rank; without it none does."""
    return folder.parent / f"frozen-{rank}"


def freezing(order: str, device: torch.device, rank: int) -> Receiver:
    return Told(hosts.vllm_receiver(order, device, rank), told(TypeAdapter(hosts.EngineOrder).validate_json(order).folder, rank))


async def serve_breaking(channel: Channel, order: bytes) -> None:
    await _serve(channel, order, "tests.engine.vllm.receivers:breaking")


async def serve_freezing(channel: Channel, order: bytes) -> None:
    await _serve(channel, order, "tests.engine.vllm.receivers:freezing")


async def _serve(channel: Channel, order: bytes, receiver: str) -> None:
    ordered = TypeAdapter(hosts.EngineOrder).validate_json(order)
    shape = Architecture.from_folder(ordered.folder)
    core = hosts._vllm_core(ordered, shape, None)
    slots, window, text = ordered.config.engine.slots, shape.window, order.decode()
    engine = VllmEngine(ordered.id, core, ordered.folder, shape, slots=slots, window=window, receiver=receiver, order=text)
    await serve_engine(engine, channel)
