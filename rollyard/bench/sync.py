"""`bench sync`: seconds from new parameters to an engine that is ready to generate, by every transport, beside raw bounds.

The engine is an embedded one in a process of its own, as in a run. Bounds move the same bytes with nothing around them.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from rollyard import hosts, worker
from rollyard.bench.consumer import LIMIT, dist, gloo
from rollyard.bench.result import Figure, Measured, Result, Side
from rollyard.bench.setting import Setting
from rollyard.bench.turns import Rounds, Tell, alternate
from rollyard.config import Config
from rollyard.durable import sync
from rollyard.environment import process_environment
from rollyard.errors import EngineError
from rollyard.events import Rollover
from rollyard.model.folder import tensors
from rollyard.place.child import Child, launch
from rollyard.place.inline import DeviceThread
from rollyard.protocols.rollouts import Engine
from rollyard.protocols.weights import Publisher
from rollyard.types import FinishReason, Request, RequestId, Sampling, WeightVersion
from rollyard.weights.flat import fill, model_infos, views
from rollyard.weights.in_place import InPlace
from rollyard.weights.layout import Layout

MOVING = ("shared_memory", "broadcast", "checkpoint")
BOUNDS = {  # what a transport cannot be faster than, and is compared with
    "shared_memory": "publish, notify, copy",
    "broadcast": "one flat broadcast",
    "checkpoint": "save, fsync, load",
    "in_place": "copy in memory",
}
STREAMS = 8  # sequences that are being written when weights change under them
STREAM_TOKENS = 1000
WARM_S = 0.3  # seconds they are let write first


@dataclass(slots=True)
class Transport:
    """One transport with its engine, in turn with the others."""

    name: str
    publisher: Publisher
    engine: Engine
    version: int = 0
    asked: int = 0

    async def warm_up(self) -> None:
        await self.roll(Rollover.DRAIN)
        await self.run(0)

    async def run(self, number: int) -> Measured:
        """Milliseconds of a sync of an idle engine; then what a sync costs one that is writing."""
        publish_s, prepare_s, load_s, copied = await self.roll(Rollover.DRAIN)
        figures = [
            Figure("publish", 1000 * publish_s, "ms"),
            Figure("prepare", 1000 * prepare_s, "ms"),
            Figure("load", 1000 * load_s, "ms"),
            Figure("bytes", copied),
        ]
        if self.name != "in_place":
            figures += await self._stall()
        return Measured(1000 * (publish_s + prepare_s + load_s), tuple(figures))

    async def roll(self, rollover: Rollover) -> tuple[float, float, float, int]:
        """Seconds of publishing, of bringing the bytes near, and of pause, load and resume; and the bytes copied."""
        self.version += 1
        version = WeightVersion(self.version)
        began = time.perf_counter()
        manifest = await self.publisher.publish(version, (self.engine.id,))
        published = time.perf_counter()
        await asyncio.gather(self.engine.prepare(manifest), self.publisher.deliver())
        prepared = time.perf_counter()
        await self.engine.pause(rollover)
        await self.engine.load(version)
        await self.engine.resume()
        ready = time.perf_counter()
        self.publisher.taken(self.engine.id, version)
        return published - began, prepared - published, ready - prepared, manifest.bytes_copied

    async def _stall(self) -> list[Figure]:
        """A sync under running sequences: how long none of them gets a token, and how fast they go meanwhile."""
        self.asked += STREAMS
        names = [RequestId(number, 0) for number in range(self.asked - STREAMS, self.asked)]
        sampling = Sampling(STREAM_TOKENS, ignore_eos=True)
        self.engine.generate([Request(name, (5 + number,) * 8, sampling, number) for number, name in enumerate(names)])
        listening = asyncio.create_task(_listen(self.engine, set(names)))
        await asyncio.sleep(WARM_S)
        before = self.engine.stats()
        _, _, stall_s, _ = await self.roll(Rollover.KEEP)
        await self.engine.abort(names)
        await listening
        after = self.engine.stats()
        step_s = before.step_s / before.steps if before.steps else 0.0
        return [
            Figure("stall under keep", 1000 * stall_s, "ms"),
            Figure("one step", 1000 * step_s, "ms"),
            Figure("steps", after.steps - before.steps),
        ]


async def _listen(engine: Engine, left: set[RequestId]) -> None:
    async for segments in engine.segments():
        for segment in segments:
            if segment.finish in (FinishReason.ERROR, FinishReason.STOP):
                raise EngineError(f"{segment.request} ended with {segment.finish} {segment.problem}")
            if segment.finish is not None:
                left.discard(segment.request)
        if not left:
            return


class Raw:
    """One bound: a coroutine function that moves the bytes once."""

    def __init__(self, name: str, move: Callable[[], Awaitable[None]]) -> None:
        self.name, self._move = name, move

    async def warm_up(self) -> None:
        await self._move()

    async def run(self, number: int) -> Measured:
        began = time.perf_counter()
        await self._move()
        return Measured(1000 * (time.perf_counter() - began))


class Bounds:
    """What can be moved by hand between this process and a consumer."""

    def __init__(self, parameters: dict[str, Tensor], layout: Layout, consumer: Child, folder: Path, threads: int) -> None:
        self._parameters, self._layout, self._consumer, self._folder = parameters, layout, consumer, folder
        self._handle = os.memfd_create("rollyard-bench")
        os.posix_fallocate(self._handle, 0, layout.size)
        self._map = mmap.mmap(self._handle, layout.size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._shared = views(torch.frombuffer(self._map, dtype=torch.uint8), layout)
        self._flat = torch.zeros(layout.size, dtype=torch.uint8)
        self._copies = {name: torch.empty_like(tensor) for name, tensor in parameters.items()}
        self._threads = threads
        self._group: Any = None

    async def begin(self) -> None:
        order = {
            "path": f"/proc/{os.getpid()}/fd/{self._handle}",
            "size": self._layout.size,
            "parts": [place.size for place in self._layout.places],
            "threads": self._threads,
        }
        await self._ask("map", order)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        joining = asyncio.to_thread(gloo, self._store, 0)
        self._group, _ = await asyncio.gather(joining, self._ask("join", self._store.port))

    def all(self) -> list[Raw]:
        moves = {
            "copy in memory": self._copy,
            "write shared memory": self._write,
            "publish, notify, copy": self._hand_over,
            "save, fsync, load": self._save,
            "one flat broadcast": self._broadcast,
            "broadcast each tensor": self._broadcast_each,
            "new shared memory each time": self._anew,
        }
        return [Raw(name, move) for name, move in moves.items()]

    async def _ask(self, name: str, order: object = None) -> None:
        await self._consumer.call(name, json.dumps(order).encode(), limit_s=LIMIT.total_seconds())

    async def _copy(self) -> None:
        fill(self._copies, self._parameters.items())

    async def _write(self) -> None:
        fill(self._shared, self._parameters.items())

    async def _hand_over(self) -> None:
        fill(self._shared, self._parameters.items())
        await self._ask("copy")

    async def _save(self) -> None:
        path = self._folder / "raw.safetensors"
        save_file(self._parameters, path)
        sync(path)
        await self._ask("read", str(path))

    async def _broadcast(self) -> None:
        sending = asyncio.to_thread(lambda: self._group.broadcast(self._flat, 0).wait())
        await asyncio.gather(sending, self._ask("flat"))

    async def _broadcast_each(self) -> None:
        def send() -> None:
            for tensor in self._parameters.values():
                self._group.broadcast(tensor.contiguous().view(-1).view(torch.uint8), 0).wait()

        await asyncio.gather(asyncio.to_thread(send), self._ask("each"))

    async def _anew(self) -> None:
        handle = os.memfd_create("rollyard-bench-anew")
        os.ftruncate(handle, self._layout.size)
        shared = mmap.mmap(handle, self._layout.size)
        fill(views(torch.frombuffer(shared, dtype=torch.uint8), self._layout), self._parameters.items())
        os.close(handle)


async def bench(setting: Setting, tell: Tell) -> Result:
    """Raises ConfigError, EngineError, WeightSyncError, TimeLimitExceeded."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollyard-bench-")))
        device = DeviceThread()
        stack.callback(device.close)
        await device.run(worker.set_threads, setting.threads)
        configs = {name: _config(setting, name) for name in MOVING}
        policy = await device.run(worker.load_policy, configs[MOVING[0]], setting.model)
        transports = []
        for name, config in configs.items():
            tell(f"{name}: starting an engine")
            publisher = worker.build_publisher(config, policy, device, folder)
            stack.callback(publisher.close)
            engine = await hosts.launch_engine(config, f"engine-{name}", setting.model)
            stack.push_async_callback(engine.close)
            await engine.start()
            transports.append(Transport(name, publisher, engine))
        transports.append(await _in_place(setting, policy, device, stack))
        consumer = await launch("rollyard.bench.consumer:serve", b"", name="consumer", environment=process_environment())
        stack.push_async_callback(consumer.close)
        layout = Layout.of(model_infos(policy.model))
        bounds = Bounds(dict(tensors(policy.model)), layout, consumer, folder, setting.threads)
        await bounds.begin()
        rounds = await alternate([*transports, *bounds.all()], setting.rounds, tell)
        return setting.result("sync", "ms", _sides(rounds), rounds, decoder=transports[0].engine.stats().decoder)


def _config(setting: Setting, transport: str) -> Config:
    own = {"model.dtype": setting.dtype, "engine.window": 1024, "place.placement": "separate", "weights.transport": transport}
    return setting.config(own)


async def _in_place(setting: Setting, policy: worker.Policy, device: DeviceThread, stack: AsyncExitStack) -> Transport:
    config = setting.config({"model.dtype": setting.dtype, "engine.window": 1024})
    shared = InPlace(policy.model)
    engine = await device.run(partial(worker.build_engine, config, "engine-in-place", policy, device, shared))
    stack.push_async_callback(engine.close)
    await engine.start()
    return Transport("in_place", shared, engine)


def _sides(rounds: Rounds) -> list[Side]:
    """A transport first, then its bound, so that every transport says how many times its bound it takes."""
    measured = dict(zip(rounds.names, rounds.measured, strict=True))

    def side(name: str) -> Side:
        extra = []
        if bound := BOUNDS.get(name):
            times = [mine.value / other.value for mine, other in zip(measured[name], measured[bound], strict=True)]
            extra = [Figure("times its bound", median(times))]
            parts = [{one.name: one.value for one in mine.figures} for mine in measured[name]]
            near = [known["publish"] + known["prepare"] for known in parts]
            times = [mine / other.value for mine, other in zip(near, measured[bound], strict=True)]
            extra.append(Figure("near the engine, times its bound", median(times)))
        return Side.of(name, measured[name], extra)

    first: Sequence[str] = ("shared_memory", BOUNDS["shared_memory"])
    return [side(name) for name in (*first, *(name for name in rounds.names if name not in first))]
