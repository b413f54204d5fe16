"""Rollyard's side of a generation benchmark: the embedded engine, given its requests as a run gives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard import worker
from rollyard.bench.result import Figure
from rollyard.bench.workload import Workload
from rollyard.config import Config
from rollyard.errors import EngineError, TimeLimitExceeded
from rollyard.place.inline import DeviceThread
from rollyard.protocols.rollouts import Engine
from rollyard.types import EngineStats, FinishReason, Request, RequestId, Sampling, WeightVersion
from rollyard.weights.in_place import InPlace

if TYPE_CHECKING:
    from rollyard.worker import Policy

LIMIT_S = 7200.0  # seconds that one run of a workload may take; peers in bfloat16 are slow where the CPU has none


@dataclass(frozen=True, slots=True)
class Written:
    """What one side wrote for a workload."""

    token_ids: tuple[tuple[int, ...], ...]  # [requests][tokens]
    seconds: float
    figures: tuple[Figure, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


@dataclass(frozen=True, slots=True)
class Served:
    """What the embedded engine wrote. `first_token_s`: seconds until every request had its first token."""

    written: Written
    first_token_s: float
    stats: EngineStats  # of this run alone


@dataclass(frozen=True, slots=True)
class Serving:
    """Engines that share one policy and one device; `engines[i]` was made from the i-th config."""

    policy: Policy
    device: DeviceThread
    engines: tuple[Engine, ...]


@asynccontextmanager
async def serving(configs: Sequence[Config], folder: Path, threads: int) -> AsyncIterator[Serving]:
    """Load the model once and start an engine for each config. They run in turn: one device thread serves them all."""
    async with AsyncExitStack() as stack:
        device = DeviceThread()
        stack.callback(device.close)
        await device.run(worker.set_threads, threads)
        policy = await device.run(worker.load_policy, configs[0], folder)
        engines = []
        for number, config in enumerate(configs):
            transport = InPlace(policy.model)
            build = partial(worker.build_engine, config, f"engine-{number}", policy, device, transport, sole=len(configs) == 1)
            engine = await device.run(build)  # there, since it may compile
            stack.push_async_callback(engine.close)
            await engine.start()
            await engine.prepare(await transport.publish(WeightVersion(0)))
            await engine.load(WeightVersion(0))
            engines.append(engine)
        yield Serving(policy, device, tuple(engines))


async def serve(engine: Engine, work: Workload) -> Served:
    """Hand over all requests at once and wait for their last tokens.

    Raises:
        EngineError: a request ended otherwise than by its length, or with another number of tokens.
        TimeLimitExceeded: the run took longer than `LIMIT_S`.
    """
    wanted = {RequestId(row // work.size, row % work.size): length for row, length in enumerate(work.lengths)}
    requests = [
        Request(id_, prompt, Sampling(length, work.temperature, ignore_eos=True), seed=row, priority=id_.group)
        for row, ((id_, length), prompt) in enumerate(zip(wanted.items(), work.prompts, strict=True))
    ]
    before = engine.stats()
    started = time.perf_counter()
    try:
        async with asyncio.timeout(LIMIT_S):
            engine.generate(requests)
            written, first_token_s = await _collect(engine, list(wanted), started)
    except TimeoutError:
        raise TimeLimitExceeded(f"the engine took more than {LIMIT_S:g} s") from None
    seconds = time.perf_counter() - started
    if {id_: len(ids) for id_, ids in written.items()} != wanted:
        raise EngineError("the engine wrote another number of tokens than was asked for")
    return Served(Written(tuple(map(tuple, written.values())), seconds), first_token_s, _between(before, engine.stats()))


async def _collect(engine: Engine, names: Sequence[RequestId], started: float) -> tuple[dict[RequestId, list[int]], float]:
    """Tokens by request, and the seconds until each had one."""
    written: dict[RequestId, list[int]] = {name: [] for name in names}
    silent, left, first_token_s = set(names), len(names), 0.0
    async for segments in engine.segments():
        for segment in segments:
            written[segment.request] += segment.token_ids
            if segment.token_ids and segment.request in silent:
                silent.remove(segment.request)
                first_token_s = time.perf_counter() - started
            if segment.finish is not None:
                left -= 1
                if segment.finish is not FinishReason.LENGTH:
                    raise EngineError(f"{segment.request} ended with {segment.finish} {segment.problem}")
        if not left:
            return written, first_token_s
    raise EngineError("the engine closed before all was written")


def _between(before: EngineStats, after: EngineStats) -> EngineStats:
    """What was added; names and numbers of slots stay."""
    totals = [
        f.name for f in fields(EngineStats) if f.name not in ("slots", "paces") and not isinstance(getattr(after, f.name), str)
    ]
    return replace(after, **{name: getattr(after, name) - getattr(before, name) for name in totals})
