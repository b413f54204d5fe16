"""Trainers in processes of their own that share one model."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rollyard import hosts, worker
from rollyard.config import AdvantageConfig, Config, PlaceConfig, RolloutConfig, TrainConfig, WeightsConfig
from rollyard.place.child import Child, launch
from rollyard.place.layout import Host
from rollyard.protocols.processes import Channel
from rollyard.train.group import TrainerGroup
from rollyard.train.ranks import Ranks
from rollyard.train.remote import RemoteTrainer
from rollyard.types import WeightVersion
from rollyard.weights.ranks import RanksEvidence, RanksPublisher
from rollyard.weights.remote import RemoteEvidence, RemotePublisher

ROOT = Path(__file__).parents[2]
LOCAL, LIMIT_S = "127.0.0.1", 30.0


@dataclass
class Shared:
    """Ranks, and what a run has of them."""

    config: Config
    children: list[Child]
    trainer: TrainerGroup
    publisher: RanksPublisher
    evidence: RanksEvidence


def config(size: int, *, kind: str = "shared_memory", limit_s: float = LIMIT_S, values: bool = False, **train: Any) -> Config:
    """`kind`: of `moving.MOVING`. `values`: with a value head."""
    transport, _, delta = kind.replace("relay", "broadcast").partition(" ")
    return Config(
        rollout=RolloutConfig(max_tokens=9),
        advantage=AdvantageConfig(kind="gae" if values else "grpo"),
        train=TrainConfig(**{"lr": 1e-2, "max_grad_norm": 1e6, "shard": size > 1, "limit_s": limit_s} | train),
        weights=WeightsConfig(transport=transport, delta=bool(delta), limit_s=limit_s),
        place=PlaceConfig(placement="separate", train=size, threads=1, device="cpu"),
    )


async def serve(channel: Channel, order: bytes) -> None:
    """A host as it is. "spoil" says how it fails, and when: as it gathers parameters for the nth time from then on. "read"
    takes a trainer's state from a folder."""
    made: list[Any] = []
    build, gather = worker.build_trainer, Ranks.all_gather

    async def noting(*args: Any) -> Any:
        made.append(await build(*args))
        return made[0]

    worker.build_trainer = noting

    async def spoil(content: bytes) -> bytes:
        calls, what = 0, json.loads(content)

        def spoilt(self: Ranks, *args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == what["at"]:
                Ranks.all_gather = gather  # type: ignore[method-assign]
                if what["how"] == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                if what["how"] == "hang":
                    time.sleep(600)
                raise OSError("out of luck")
            gather(self, *args)

        Ranks.all_gather = spoilt  # type: ignore[method-assign]
        return b""

    async def read(content: bytes) -> bytes:
        await made[0].load_state(Path(content.decode()))
        return b""

    for name, handler in (("spoil", spoil), ("read", read)):
        channel.handle(name, handler)
    await hosts.serve_host(channel, order)


@asynccontextmanager
async def shared(folder: Path, scratch: Path, size: int, *, state: Path | None = None, **options: Any) -> AsyncIterator[Shared]:
    """`state`: go on from a checkpoint, which is `folder`, too."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    ordered, children = config(size, **options), list[Child]()
    try:
        for rank in range(size):
            name = f"trainer-{rank}"
            order = TypeAdapter(hosts.HostOrder).dump_json(hosts.HostOrder(ordered, Host(name, 1, rank=rank), folder, scratch))
            children.append(await launch("tests.train.sharing:serve", order, name=name, environment=environment))
        members = [RemoteTrainer(child.name, child, WeightVersion(0), start_s=50.0, step_s=60.0) for child in children]
        for child in children:
            child.ready()
        for member, child in zip(members, children, strict=True):
            await member.start()
            if state is not None:
                await child.call("read", str(state).encode(), limit_s=20.0)
                await member.start()
        group = TrainerGroup(members, LOCAL, ordered.train.limit_s, shards=ordered.train.shard)
        publishers = [RemotePublisher(child, ordered.weights.limit_s) for child in children]
        evidence = [RemoteEvidence(child, ordered.weights.limit_s) for child in children]
        yield Shared(
            ordered, children, group, RanksPublisher(publishers, group.together), RanksEvidence(evidence, group.together)
        )
    finally:
        for child in children:
            child.kill()
            await child.close()
