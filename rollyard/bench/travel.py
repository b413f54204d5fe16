"""`bench sync --workload delta` and `relay`: what travels less, beside what travels whole.

Delta: a share of all numbers changes, and an engine in a process of its own gets that by each transport, whole and as what
changed. Relay: one broadcast to several engines of this machine, to one whose memory the others map, and to each.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch
from pydantic import TypeAdapter
from torch import Tensor

from rollyard import hosts, worker
from rollyard.bench.memory import memory
from rollyard.bench.result import Figure, Measured, Result, Side
from rollyard.bench.setting import Setting
from rollyard.bench.sync import Bounds, Raw
from rollyard.bench.turns import Rounds, Tell, alternate
from rollyard.config import Config
from rollyard.environment import process_environment
from rollyard.events import Rollover
from rollyard.model.folder import tensors
from rollyard.place.child import Child, launch
from rollyard.place.inline import DeviceThread
from rollyard.protocols.processes import Channel
from rollyard.protocols.rollouts import Engine
from rollyard.protocols.weights import Publisher
from rollyard.types import WeightVersion
from rollyard.weights import relay
from rollyard.weights.delta import Scan, apply
from rollyard.weights.flat import fill, model_infos, views
from rollyard.weights.layout import Layout

MOVING = ("broadcast", "checkpoint", "shared_memory")
BOUNDS = {"broadcast": "one flat broadcast", "checkpoint": "save, fsync, load", "shared_memory": "publish, notify, copy"}
SHARES = (0.001, 0.01, 0.1)
ENGINES = (1, 2, 4)


class Changer:
    """Changes a share of a model's numbers, always the same ones, in their last bit."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = [tensor.view(-1) for tensor in parameters.values()]
        self._at: dict[float, list[Tensor]] = {}

    def change(self, share: float) -> None:
        dice = torch.Generator().manual_seed(int(share * 1e6))
        if share not in self._at:
            sizes = [(len(flat), max(int(len(flat) * share), 1)) for flat in self._parameters]
            self._at[share] = [torch.randint(size, (count,), generator=dice).unique() for size, count in sizes]
        for flat, at in zip(self._parameters, self._at[share], strict=True):
            bits = flat.view(torch.int16 if flat.element_size() == 2 else torch.int32)
            bits.index_copy_(0, at, bits.index_select(0, at) ^ 1)


@dataclass
class Sync:
    """A publisher and its engines."""

    publisher: Publisher
    engines: Sequence[Engine]
    processes: Sequence[int] = ()  # whose memory is told
    version: int = 0

    async def roll(self) -> tuple[float, float, float]:
        """Seconds of publishing, of that and until it is near all engines, and of loading it there."""
        self.version += 1
        version, ids = WeightVersion(self.version), [engine.id for engine in self.engines]
        began = time.perf_counter()
        manifest = await self.publisher.publish(version, ids)
        published = time.perf_counter()
        await asyncio.gather(self.publisher.deliver(), *(engine.prepare(manifest) for engine in self.engines))
        near = time.perf_counter()
        for engine in self.engines:
            await engine.pause(Rollover.DRAIN)
            await engine.load(version)
            await engine.resume()
            self.publisher.taken(engine.id, version)
        return published - began, near - began, time.perf_counter() - near


class Moved:
    """Timed until a change is near the engines."""

    def __init__(self, name: str, sync: Sync, change: Callable[[], None], device: DeviceThread) -> None:
        self.name, self._sync, self._change, self._device = name, sync, change, device
        self._memory: tuple[Figure, ...] = ()

    async def warm_up(self) -> None:
        await self.run(0)
        resident = [figure.value for pid in self._sync.processes for figure in memory(pid) if figure.name == "memory"]
        self._memory = (Figure("memory", sum(resident), "MiB"),) if resident else ()

    async def run(self, number: int) -> Measured:
        """What others changed meanwhile goes first, then one change more, so that all memory is one change behind."""
        for _ in range(2):
            await self._device.run(self._change)
            await self._sync.roll()
        await self._device.run(self._change)
        publish_s, near_s, load_s = await self._sync.roll()
        sent = await self._sync.publisher.deliver()
        assert sent is not None
        figures = [Figure("publish", 1000 * publish_s, "ms"), Figure("prepare", 1000 * (near_s - publish_s), "ms")]
        figures += [Figure("load", 1000 * load_s, "ms"), Figure("bytes", sent.bytes)]
        return Measured(1000 * near_s, (*figures, *self._memory))


class Alone:
    """Finding what changed, and applying it, in this process: how many bytes of weights a second."""

    def __init__(
        self, share: float, parameters: Mapping[str, Tensor], layout: Layout, change: Callable[[], None], what: str
    ) -> None:
        self.name = f"{what} {share:.1%}"
        self._parameters, self._layout, self._change, self._find = parameters, layout, change, what == "find"
        self._buffer, self._other = (torch.zeros(layout.size, dtype=torch.uint8) for _ in range(2))

    async def warm_up(self) -> None:
        for buffer in (self._buffer, self._other):
            fill(views(buffer, self._layout), self._parameters.items())
        await self.run(0)

    async def run(self, number: int) -> Measured:
        for buffer in (self._buffer, self._other):
            fill(views(buffer, self._layout), self._parameters.items())
        self._change()
        buckets, began = self._layout.buckets(), time.perf_counter()
        frames = list(Scan(self._buffer, self._layout, buckets).frames(self._parameters.items()))
        found = time.perf_counter()
        for place, (frame, (start, end)) in enumerate(zip(frames, buckets, strict=True), start=1):
            if frame is not None:
                apply(frame, self._other[start:end], place)
        seconds = found - began if self._find else time.perf_counter() - found
        return Measured(1000 * seconds, (Figure("rate", self._layout.size / seconds / 1e9, "GB/s"),))


async def bench(setting: Setting, tell: Tell) -> Result:
    """Raises ConfigError, EngineError, WeightSyncError, TimeLimitExceeded."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollyard-bench-")))
        device = DeviceThread()
        stack.callback(device.close)
        await device.run(worker.set_threads, setting.threads)
        policy = await device.run(worker.load_policy, _config(setting, MOVING[0]), setting.model)
        changer = Changer(tensors(policy.model))
        consumer = await launch("rollyard.bench.consumer:serve", b"", name="consumer", environment=process_environment())
        stack.push_async_callback(consumer.close)
        layout = Layout.of(model_infos(policy.model))
        raw = Bounds(tensors(policy.model), layout, consumer, folder, setting.threads)
        await raw.begin()
        measured = await (_deltas if setting.workload == "delta" else _relays)(
            setting, tell, policy, device, folder, changer, stack
        )
        kept = {*(BOUNDS.values() if setting.workload == "delta" else ("one flat broadcast",)), "copy in memory"}
        sides: list[Moved | Alone | Raw] = [*measured, *(one for one in raw.all() if one.name in kept)]
        if setting.workload == "delta":
            alone = [
                Alone(share, tensors(policy.model), layout, partial(changer.change, share), what)
                for what in ("find", "apply")
                for share in SHARES
            ]
            sides += alone
        rounds = await alternate(sides, setting.rounds, tell)
        return setting.result("sync", "ms", _sides(rounds), rounds)


async def _deltas(
    setting: Setting,
    tell: Tell,
    policy: worker.Policy,
    device: DeviceThread,
    folder: Path,
    changer: Changer,
    stack: AsyncExitStack,
) -> list[Moved]:
    """Every transport whole, and with each share of changes."""
    found = []
    for transport in MOVING:
        for delta in (False, True):
            tell(f"{transport}{' delta' * delta}: starting an engine")
            config = _config(setting, transport, delta)
            scratch = folder / f"{transport}-{delta}"
            publisher = worker.build_publisher(config, policy, device, scratch)
            stack.callback(publisher.close)
            engine = await hosts.launch_engine(config, f"{transport}-{delta}", setting.model)
            stack.push_async_callback(engine.close)
            await engine.start()
            sync = Sync(publisher, [engine])
            for share in SHARES if delta else SHARES[:1]:
                name = f"{transport} {share:.1%} changed" if delta else transport
                found.append(Moved(name, sync, partial(changer.change, share), device))
    return found


async def _relays(
    setting: Setting,
    tell: Tell,
    policy: worker.Policy,
    device: DeviceThread,
    folder: Path,
    changer: Changer,
    stack: AsyncExitStack,
) -> list[Moved]:
    """1, 2 and 4 engines, as they are and each as if on a machine of its own."""
    found, config = [], _config(setting, "broadcast")
    for way, target in (("to one of", "rollyard.hosts:serve_engine"), ("to each of", "rollyard.bench.travel:apart")):
        engines, processes = list[Engine](), list[int]()
        for number in range(max(ENGINES)):
            tell(f"{way} {max(ENGINES)}: starting engine {number + 1}")
            id_ = f"e{number}"
            order = TypeAdapter(hosts.EngineOrder).dump_json(hosts.EngineOrder(config, id_, setting.model))
            child: Child = await launch(target, order, name=f"engine {id_}", environment=process_environment())
            engine = hosts.remote_engine(config, id_, child)
            stack.push_async_callback(engine.close)
            await engine.start()
            engines.append(engine)
            processes.append(child.pid)
        publisher = worker.build_publisher(config, policy, device, folder)
        stack.callback(publisher.close)
        for count in ENGINES:  # a group for each, in turn
            sync = Sync(publisher, engines[:count], processes[:count])
            found.append(Moved(f"{way} {count}", sync, partial(changer.change, SHARES[0]), device))
    return found


async def apart(channel: Channel, order: bytes) -> None:
    """An engine that shares nothing with others of its machine."""
    relay.here = lambda address: uuid.uuid4().hex
    await hosts.serve_engine(channel, order)


def _config(setting: Setting, transport: str, delta: bool = False) -> Config:
    own: dict[str, object] = {"model.dtype": setting.dtype, "engine.window": 1024, "place.placement": "separate"}
    return setting.config(own | {"weights.transport": transport, "weights.delta": delta})


def _sides(rounds: Rounds) -> list[Side]:
    """Each with how many times it takes what moves all bytes with nothing around them."""
    measured = dict(zip(rounds.names, rounds.measured, strict=True))

    def side(name: str) -> Side:
        extra, bound = [], BOUNDS.get(name.split()[0], "one flat broadcast" if name.startswith("to ") else "")
        if bound:
            times = [mine.value / other.value for mine, other in zip(measured[name], measured[bound], strict=True)]
            extra = [Figure("times its bound", median(times))]
        return Side.of(name, measured[name], extra)

    first = (rounds.names[0], "one flat broadcast")
    return [side(name) for name in (*first, *(name for name in rounds.names if name not in first))]
