"""`bench train`: the trainer's step on a synthetic batch, beside its own matrix products alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rollyard import worker
from rollyard.batch.sample import build
from rollyard.bench.result import Figure, Measured, Result
from rollyard.bench.setting import Setting
from rollyard.bench.turns import Tell, alternate
from rollyard.bench.workload import Shape, Workload
from rollyard.bench.workload import build as workload
from rollyard.config import Config
from rollyard.model.architecture import Architecture
from rollyard.model.flops import Gemm, attention_flops, gemms
from rollyard.place.inline import DeviceThread
from rollyard.protocols.training import Trainer
from rollyard.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    Sampling,
    TrainBatch,
    VersionSpan,
    WeightVersion,
)

if TYPE_CHECKING:
    import torch

TRIALS = 3  # of each matrix product; the fastest counts
LOGPROB = -10.0  # behaviour logprob of every token: about that of a random one

TRAIN = {"8x8": Shape(8, 8, (24, 40), 64), "ragged": Shape(8, 8, (24, 40), 0)}


def batch(config: Config, work: Workload, step: int) -> TrainBatch:
    """A batch as a run would train on it, of random tokens; members of a group have advantages 1 and -1 in turn."""
    version = WeightVersion(step)
    groups, advantages = [], []
    for number in range(0, len(work.prompts), work.size):
        rollouts = []
        for member in range(work.size):
            length = work.lengths[number + member]
            ids = tuple(work.prompts[number][place % len(work.prompts[number])] + 1 for place in range(member, member + length))
            spans = (VersionSpan(version, version, length),)
            done = Completion(number, member, ids, (LOGPROB,) * length, spans, FinishReason.LENGTH, "")
            rollouts.append(Rollout(done, Reward(float(member % 2))))
        groups.append(Group(Prompt(number, number, work.prompts[number], ""), tuple(rollouts)))
        advantages.append([1.0 if member % 2 else -1.0 for member in range(work.size)])
    return build(step, groups, advantages, config.batch.token_budget, Sampling(max(work.lengths)))


def shapes(made: TrainBatch, architecture: Architecture) -> tuple[Gemm, ...]:
    """The products of a step as the trainer makes them on a CPU: of pieces of the batch, and of chunks of the head."""
    from rollyard.model.head import chunks
    from rollyard.train.rows import CACHED_TOKENS, pieces

    def head(rows: int) -> list[int]:
        return [part.stop - part.start for part in chunks(rows, architecture.vocab_size)]

    cut = (piece for samples in made.micro_batches for piece in pieces(samples, CACHED_TOKENS))
    apart = tuple(tuple(sample for family in piece for sample in family) for piece in cut)
    return gemms(replace(made, micro_batches=apart), architecture, head)


class Step:
    """The trainer."""

    name = "training step"

    def __init__(self, trainer: Trainer, config: Config, architecture: Architecture, shape: Shape) -> None:
        self._trainer, self._config, self._architecture, self._shape = trainer, config, architecture, shape

    def batch(self, number: int) -> TrainBatch:
        work = workload(self._shape, self._architecture.vocab_size - 1, number)
        return batch(self._config, work, self._trainer.version.step)

    async def warm_up(self) -> None:
        await self._trainer.train([self.batch(0)])

    async def run(self, number: int) -> Measured:
        made = self.batch(number)
        started = time.perf_counter()
        stats = await self._trainer.train([made])
        seconds = time.perf_counter() - started
        flops = sum(gemm.flops for gemm in gemms(made, self._architecture))
        return Measured(
            seconds,
            (
                Figure("trained tokens", stats.tokens / seconds, "tokens/s"),
                Figure("matrix products", flops / seconds / 1e9, "GFLOP/s"),
                Figure("attention", attention_flops(made, self._architecture) / flops, "of their FLOPs"),
                Figure("micro-batches", len(made.micro_batches)),
            ),
        )


class Products:
    """The matrix products of a step, forward and backward, in the trainer's own shapes, and nothing else.

    Each is timed alone, `TRIALS` times; the step is the sum of the fastest times its count.
    """

    name = "its matrix products alone"

    def __init__(self, device: DeviceThread, step: Step, architecture: Architecture, dtype: str) -> None:
        self._device, self._step, self._architecture, self._dtype = device, step, architecture, dtype

    async def warm_up(self) -> None:
        await self.run(0)

    async def run(self, number: int) -> Measured:
        needed = shapes(self._step.batch(number), self._architecture)
        seconds = await self._device.run(products_s, needed, self._dtype)
        return Measured(seconds, (Figure("matrix products", sum(gemm.flops for gemm in needed) / seconds / 1e9, "GFLOP/s"),))


def products_s(needed: Sequence[Gemm], dtype: str) -> float:
    """Seconds that these products take by themselves."""
    import torch

    kind = getattr(torch, dtype)
    return sum(gemm.count * _product_s(torch.device("cpu"), kind, gemm) for gemm in needed)


def _product_s(device: torch.device, dtype: torch.dtype, gemm: Gemm) -> float:
    """Forward, gradient of the input, gradient of the weight; into memory that is there already."""
    import torch

    x = torch.randn(gemm.rows, gemm.inner, device=device, dtype=dtype)
    w = torch.randn(gemm.columns, gemm.inner, device=device, dtype=dtype)
    y = torch.empty(gemm.rows, gemm.columns, device=device, dtype=dtype)
    dy = torch.ones_like(y)
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    fastest = []
    for left, right, out in ((x, w.t(), y), (dy, w, dx), (dy.t(), x, dw)):
        seconds = []
        for _ in range(TRIALS):
            started = time.perf_counter()
            torch.mm(left, right, out=out)
            seconds.append(time.perf_counter() - started)
        fastest.append(min(seconds))
    return sum(fastest)


async def bench(setting: Setting, tell: Tell) -> Result:
    """Seconds of both, alternating; the ratio is the share of the step that its matrix products explain."""
    return await measure(setting, TRAIN[setting.workload], tell)


async def measure(setting: Setting, shape: Shape, tell: Tell) -> Result:
    """`bench` on a shape of one's own. Raises TrainError when a step fails."""
    precision = "bfloat16" if setting.dtype == "bfloat16" else "model"
    config = setting.config({"train.precision": precision, "rollout.max_tokens": max(shape.window - shape.prompt[1], 1)})
    architecture = Architecture.from_folder(setting.model)
    async with AsyncExitStack() as stack:
        device = DeviceThread()
        stack.callback(device.close)
        await device.run(worker.set_threads, setting.threads)
        policy = await device.run(worker.load_policy, config, setting.model)
        trainer = await worker.build_trainer(config, policy, device, worker.FROM_THE_START)
        stack.push_async_callback(trainer.close)
        step = Step(trainer, config, architecture, shape)
        contenders = (step, Products(device, step, architecture, setting.dtype))
        rounds = await alternate(contenders, setting.rounds, tell)
    sides = rounds.sides()
    return setting.result("train", "s", sides, rounds)
