"""What children of these tests run: a trainer each."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import torch

from rollyard.config import TrainConfig
from rollyard.model.folder import load
from rollyard.place.child import Child, launch
from rollyard.place.inline import DeviceThread
from rollyard.protocols.processes import Channel
from rollyard.train.group import TrainerGroup
from rollyard.train.host import serve_member
from rollyard.train.reference import Reference
from rollyard.train.remote import RemoteTrainer
from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import WeightVersion

ROOT = Path(__file__).parents[2]
LOCAL = "127.0.0.1"


def make(folder: Path, *, first: Path | None = None, values: bool = False, **config: object) -> ReferenceTrainer:
    """A trainer with a device of its own: ranks of one process must not wait for one another on the same.

    Args:
        first: of a reference policy.
        values: with a value head.
    """
    reference = None if first is None else Reference(load(first))
    options = {"lr": 1e-2, "max_grad_norm": 1e6, "correction": "none"} | config
    made, v0 = TrainConfig(**options), WeightVersion(0)
    return ReferenceTrainer(load(folder), DeviceThread(), made, 9, folder, v0, reference=reference, values=values)


async def trainer(channel: Channel, order: bytes) -> None:
    """Trains the model in the folder that is ordered.

    "digest" tells all parameters, as bits. "hang" and "die" are what it does at the end of its part of the next step.
    """
    torch.set_num_threads(1)
    made = make(Path(order.decode()))

    async def digest(content: bytes) -> bytes:
        return json.dumps(
            {name: value.view(torch.int32).tolist() for name, value in made.state().items() if "/" not in name}
        ).encode()

    async def hang(content: bytes) -> bytes:
        made._ranks.add_up = lambda flat: time.sleep(600)  # type: ignore[method-assign]
        return b""

    async def die(content: bytes) -> bytes:
        made._ranks.add_up = lambda flat: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        return b""

    for name, handler in (("digest", digest), ("hang", hang), ("die", die)):
        channel.handle(name, handler)
    serve_member(made, channel, made._device.spans)
    channel.ready()
    await channel.ended()


@asynccontextmanager
async def children(folder: Path, count: int, limit_s: float = 30.0) -> AsyncIterator[tuple[list[Child], TrainerGroup]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    launched: list[Child] = []
    try:
        for rank in range(count):
            name, order = f"trainer {rank}", str(folder).encode()
            launched.append(await launch("tests.train.hosts:trainer", order, name=name, environment=environment))
        members = []
        for child in launched:
            child.ready()
            members.append(RemoteTrainer(child.name, child, WeightVersion(0), start_s=50.0, step_s=60.0))
        for member in members:
            await member.start()
        yield launched, TrainerGroup(members, LOCAL, limit_s)
    finally:
        for child in launched:
            child.kill()
            await child.close()
