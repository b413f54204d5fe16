"""A trainer's state that travels, and what children of these tests run with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor

from rollyard.model.stamp import WeightStamp
from rollyard.place.inline import DeviceThread
from rollyard.protocols.processes import Channel
from rollyard.protocols.weights import Publisher, Receiver
from rollyard.types import WeightVersion
from rollyard.weights.broadcast import BroadcastPublisher
from rollyard.weights.handoff import StateHandoff
from rollyard.weights.host import serve_handoff
from rollyard.weights.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from rollyard.weights.source import OwnSource
from tests.weights.moving import Spoiling

CPU = torch.device("cpu")


class State:
    """Parameters, moments, counts and a random state, as a trainer has them. `names` of parameters."""

    def __init__(self, seed: int, names: tuple[str, ...] = ("a", "b", "c")) -> None:
        self.stamp, self.random, self.version = WeightStamp(), torch.Generator(), WeightVersion(0)
        self._tensors: dict[str, Tensor] = {}
        for number, name in enumerate(names):
            for part in ("weight", "exp_avg", "exp_avg_sq"):
                dtype = torch.bfloat16 if part == "weight" and number == 1 else torch.float32
                self._tensors[f"{part}/{name}"] = torch.zeros(17 + number, 33, dtype=dtype)
            self._tensors[f"step/{name}"] = torch.zeros(())
        self.train(seed)

    def train(self, seed: int) -> None:
        """Everything changes."""
        self.random.manual_seed(seed)
        with self.stamp.writing():
            for tensor in self._tensors.values():
                tensor.copy_(torch.randn(tensor.shape, generator=self.random))
        self.version = WeightVersion(seed)

    def tensors(self) -> Mapping[str, Tensor]:
        """The random state is a copy, which `become` looks at."""
        self._random = self.random.get_state()
        return {**self._tensors, "random": self._random, "odd": torch.tensor([7, 0, 255], dtype=torch.uint8)}  # three bytes

    def become(self, version: WeightVersion) -> None:
        """What was written is of this version."""
        self.random.set_state(self._random)
        self.version = version

    def digest(self) -> str:
        """Of all of it, bit for bit."""
        found = hashlib.sha256(repr(self.version).encode())
        for tensor in self.tensors().values():
            found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return found.hexdigest()


class Half:
    """One side, by either transport."""

    def __init__(self, name: str, transport: str, state: State, limit_s: float = 20.0) -> None:
        self.state, self.device = state, DeviceThread(lambda: torch.set_num_threads(1))
        self.source = OwnSource(state.tensors, state.stamp, CPU)
        publisher: Publisher
        if transport == "shared_memory":
            publisher = SharedMemoryPublisher(self.source, self.device, slots=1)
            self.receiver: Receiver = SharedMemoryReceiver(self.source.infos, CPU)
        else:
            publisher = BroadcastPublisher(self.source, self.device, "127.0.0.1", limit_s)
            self.receiver = Spoiling(name, self.source.infos, CPU, limit_s, buffers=1)
        self.handoff = StateHandoff(self.source, self.device, publisher, self.receiver)

    def close(self) -> None:
        self.handoff.close()
        self.device.close()


async def half(channel: Channel, order: bytes) -> None:
    """A child with a state: it gives, takes, trains, and says what it has."""
    ordered = json.loads(order)
    made = Half(ordered["name"], ordered["transport"], State(ordered["seed"]))

    async def train(content: bytes) -> bytes:
        await made.device.run(made.state.train, int(content))
        return b""

    async def become(content: bytes) -> bytes:
        await made.device.run(made.state.become, WeightVersion(int(content)))
        return b""

    async def digest(content: bytes) -> bytes:
        return (await made.device.run(made.state.digest)).encode()

    channel.handle("train", train)
    channel.handle("become", become)
    channel.handle("digest", digest)
    serve_handoff(made.handoff, channel)
    channel.ready()
    try:
        await channel.ended()
    finally:
        made.close()
