"""One trainer, two with a copy each, two that share one policy: seconds of a step, and memory of each process.

    python benchmarks/shards.py MODEL_FOLDER [--rounds 5]

The sides take turns. Every process has one thread. The batch has 8 prompts of 32 tokens with 4 completions of 32 each.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rollyard.bench.memory import memory, reset_peak
from rollyard.config import Config, PlaceConfig, RolloutConfig, TrainConfig
from rollyard.hosts import HostOrder, launch_host
from rollyard.place.child import launch
from rollyard.place.layout import Host
from rollyard.protocols.processes import Channel
from rollyard.train.group import TrainerGroup
from rollyard.train.remote import RemoteTrainer
from rollyard.types import Sample, Sampling, TrainBatch, WeightVersion
from rollyard.weights.ranks import RanksPublisher
from rollyard.weights.remote import RemotePublisher

SIDES = {"one": (1, False), "two copies": (2, False), "two that share": (2, True)}
PROMPTS, COMPLETIONS, TOKENS = 8, 4, 32


def batch(step: int, ranks: int) -> list[TrainBatch]:
    """Whole prompts to each rank, one micro-batch."""
    draw = random.Random(step)
    found = []
    for group in range(PROMPTS):
        prompt = tuple(draw.randrange(10, 40) for _ in range(TOKENS))
        mask = (False,) * TOKENS + (True,) * TOKENS
        samples = []
        for member in range(COMPLETIONS):
            ids = prompt + tuple(draw.randrange(10, 40) for _ in range(TOKENS))
            gains = tuple(float(member % 2) - 0.5 if flag else 0.0 for flag in mask)
            samples.append(Sample(group, member, ids, mask, tuple(-3.0 * flag for flag in mask), gains, ()))
        found.append(samples)
    parts = [[sample for samples in found[rank::ranks] for sample in samples] for rank in range(ranks)]
    return [TrainBatch(step, (tuple(part),), Sampling(TOKENS)) for part in parts]


class Side:
    """One to three processes, and the steps they took."""

    def __init__(self, ranks: int, channels: list[Channel], group: TrainerGroup, publisher: RanksPublisher | RemotePublisher):
        self.ranks, self.channels, self.group, self.publisher = ranks, channels, group, publisher
        self.steps, self.publications = list[float](), list[float]()
        self.loss = 0.0

    async def step(self, number: int) -> None:
        began = time.perf_counter()
        self.loss = (await self.group.train(batch(number, self.ranks))).loss
        self.steps.append(time.perf_counter() - began)

    async def publish(self, number: int) -> None:
        began = time.perf_counter()
        await self.publisher.publish(WeightVersion(number), ("e0",))
        self.publications.append(time.perf_counter() - began)

    def memory(self) -> list[float]:
        """MiB at most, of each process."""
        return [memory(channel.pid)[0].value for channel in self.channels]  # type: ignore[attr-defined]

    def reset(self) -> None:
        for channel in self.channels:
            reset_peak(channel.pid)  # type: ignore[attr-defined]


async def side(folder: Path, scratch: Path, ranks: int, shard: bool, closing: AsyncExitStack) -> Side:
    config = Config(
        rollout=RolloutConfig(max_tokens=TOKENS),
        train=TrainConfig(lr=1e-6, shard=shard),
        place=PlaceConfig(placement="separate", train=ranks, threads=1, device="cpu"),
    )
    channels, members = list[Channel](), list[RemoteTrainer]()
    for rank in range(ranks):
        channel = await launch_host(HostOrder(config, Host(f"trainer-{rank}", 1, rank=rank), folder, scratch), launch)
        closing.push_async_callback(channel.close)
        channel.ready()
        channels.append(channel)
        members.append(RemoteTrainer(f"trainer-{rank}", channel, WeightVersion(0), start_s=300.0, step_s=300.0))
    for member in members:
        await member.start()
    group = TrainerGroup(members, config.weights.address, 300.0, shards=shard)
    publishers = [RemotePublisher(channel, 300.0) for channel in channels]
    return Side(ranks, channels, group, RanksPublisher(publishers, group.together) if shard else publishers[0])


async def run(folder: Path, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        async with AsyncExitStack() as closing:
            sides = {name: await side(folder, Path(scratch) / name, *asked, closing) for name, asked in SIDES.items()}
            for number in range(rounds + 1):
                for each in sides.values():
                    if number == 1:
                        each.steps.clear()  # the first is to warm up
                    await each.step(number)
            trained = {name: each.memory() for name, each in sides.items()}
            for each in sides.values():
                await each.publish(rounds)
            for each in sides.values():
                each.reset()
            before = {name: each.memory() for name, each in sides.items()}
            for each in sides.values():
                await each.publish(rounds + 1)
            for name, each in sides.items():
                more = [after - had for after, had in zip(each.memory(), before[name], strict=True)]
                show(name, each, trained[name], more)


def show(name: str, side: Side, peak: Sequence[float], more: Sequence[float]) -> None:
    shown = [" and ".join(f"{value:,.0f}" for value in values) for values in (peak, more)]
    step, publication = statistics.median(side.steps), side.publications[-1]
    print(f"{name}: step {step:.2f} s ({min(side.steps):.2f} to {max(side.steps):.2f}), memory {shown[0]} MiB at most;")
    print(f"  publishing {publication:.2f} s, and {shown[1]} MiB more; loss {side.loss:.6f}")


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("folder", type=Path)
    asked.add_argument("--rounds", type=int, default=5)
    given = asked.parse_args()
    asyncio.run(run(given.folder.resolve(), given.rounds))
