"""An engine in a child whose receiver hands out, once, a tensor that does not fit: the update breaks half way."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from pydantic import TypeAdapter
from torch import Tensor

from rollyard import worker
from rollyard.engine.host import serve as serve_engine
from rollyard.engine.vllm.arguments import arguments
from rollyard.engine.vllm.engine import VllmEngine
from rollyard.engine.vllm.local import LocalCore
from rollyard.model.architecture import Architecture
from rollyard.protocols import Channel, Receiver
from rollyard.types import Manifest, WeightVersion

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


def receiver(order: str, device: torch.device) -> Receiver:
    return Breaking(worker.vllm_receiver(order, device))


async def serve(channel: Channel, order: bytes) -> None:
    ordered = TypeAdapter(worker.EngineOrder).validate_json(order)
    shape = Architecture.from_folder(ordered.folder)
    config = ordered.config.engine
    engine = VllmEngine(
        ordered.id,
        LocalCore(partial(arguments, ordered.folder, shape, config, "float32", shape.window, 1)),
        ordered.folder,
        shape,
        slots=config.slots,
        window=shape.window,
        receiver="tests.engine.vllm.breaking:receiver",
        order=order.decode(),
    )
    await serve_engine(engine, channel)
