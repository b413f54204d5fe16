"""What runs in other processes: how each is started, and what it builds and serves there."""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import TypeAdapter

from rollyard import worker
from rollyard.config import Config, EngineConfig
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.host import serve
from rollyard.engine.remote import Bend, RemoteEngine
from rollyard.engine.vllm import arguments as vllm
from rollyard.environment import engine_keys, process_environment
from rollyard.errors import ConfigError
from rollyard.events import EngineId
from rollyard.model.architecture import Architecture, base_of
from rollyard.place import child
from rollyard.place.inline import DeviceThread
from rollyard.place.layout import Host
from rollyard.protocols.processes import Channel, Process
from rollyard.protocols.rollouts import Engine
from rollyard.protocols.weights import Receiver
from rollyard.weights.shares import worker_name

if TYPE_CHECKING:
    import torch

    from rollyard.engine.http import Client
    from rollyard.engine.vllm.core import Core

Launch = Callable[..., Awaitable[Process]]  # of protocols.Launcher


@dataclass(frozen=True, slots=True)
class HostOrder:
    """All that another process needs to build a trainer, and an engine beside it that decodes with its parameters."""

    config: Config
    host: Host
    folder: Path  # of the model
    scratch: Path  # the run's
    begin: worker.Beginning = worker.FROM_THE_START


async def launch_host(order: HostOrder, launch: Launch) -> Process:
    """Start a process with a trainer. Raises EngineLost when it cannot be started."""
    content = TypeAdapter(HostOrder).dump_json(order)
    environment = process_environment()
    if order.config.train.shard:  # glibc would keep what layers were gathered in: as much again as what is shared
        environment = {"MALLOC_MMAP_THRESHOLD_": str(2**20), **environment}
    return await launch("rollyard.hosts:serve_host", content, name=order.host.name, environment=environment)


async def serve_host(channel: Channel, order: bytes) -> None:
    """What it runs: build the trainer, and the engine if there is one; serve them until the line ends."""
    from rollyard.train import host as trainers
    from rollyard.watch.spans import telling
    from rollyard.weights import host as weights

    ordered = TypeAdapter(HostOrder).validate_json(order)
    config, engine, device = ordered.config, ordered.host.engine, DeviceThread()
    with ExitStack() as built:
        built.callback(device.close)
        await device.run(worker.set_threads, worker.threads_of(config, Architecture.from_folder(ordered.folder)))
        if config.train.adapter:
            await _serve_external(ordered, device, built, channel)
            return
        ranks = worker.ranks_of(config, ordered.host.rank)
        policy = await device.run(worker.load_policy, config, ordered.folder, ranks, ordered.begin.checkpoint)
        trainer = await worker.build_trainer(config, policy, device, ordered.begin, ranks)
        publishing, proving = (worker.joint(what, policy, device, ranks) for what in ("a publication", "evidence"))
        publisher = worker.build_publisher(config, policy, publishing, ordered.scratch)
        built.callback(publisher.close)
        trainers.serve_member(trainer, channel, device.spans, worker.address_of(config))
        weights.serve(publisher, worker.build_evidence(config, policy, device, proving), channel)
        if config.place.placement == "swap":
            assert engine is not None, "a half has an engine"
            handoff = worker.build_handoff(config, engine, policy, trainer, device)
            built.callback(handoff.close)
            weights.serve_handoff(handoff, channel)
        if engine is not None:
            receiver = cast(Receiver, publisher)
            build = partial(worker.build_engine, config, engine, policy, device, receiver, own=True)
            await serve(await device.run(build), channel)
            return
        channel.ready()
        async with telling(device.spans, channel):
            await channel.ended()


async def _serve_external(ordered: HostOrder, device: DeviceThread, built: ExitStack, channel: Channel) -> None:
    """The same with a trainer of another stack, and no engine."""
    from rollyard import external
    from rollyard.train import host as trainers
    from rollyard.watch.spans import telling
    from rollyard.weights import host as weights

    config, folder = ordered.config, ordered.folder
    trainer, source, evidence = await device.run(external.build_external, config, folder, device, ordered.begin)
    try:
        publisher = worker.publisher_of(config, source, device, folder, ordered.scratch)
        built.callback(publisher.close)
        trainers.serve(trainer, channel, device.spans)
        weights.serve(publisher, evidence, channel)
        channel.ready()
        async with telling(device.spans, channel):
            await channel.ended()
    finally:
        await trainer.close()


@dataclass(frozen=True, slots=True)
class EngineOrder:
    """All that a child needs to build its engine."""

    config: Config
    id: EngineId
    folder: Path  # of the model; the child works in the same folder as its parent


def interpreter(engine: EngineConfig) -> Path | None:
    """What runs an engine in its own process: the one that is named, vLLM's environment, or this one (None).

    Raises ConfigError when it is not there, or vLLM has no environment.
    """
    if engine.python:
        found = shutil.which(engine.python)
        if found is None:
            raise ConfigError(f"{engine.python!r} is no program", where="engine.python", remedy="give the path of an interpreter")
        return Path(found)
    if engine.kind != "vllm":
        return None
    python = Path(__file__).parents[1] / "benchmarks" / ".venvs" / "vllm" / "bin" / "python"
    if not python.exists():
        problem = f"vLLM has no environment ({python} is not there)"
        remedy = "run make vllm in a clone of Rollyard, or name an interpreter that has vllm, sortedcontainers and tomli_w"
        raise ConfigError(problem, where="engine.python", remedy=remedy)
    return python


async def launch_engine(
    config: Config, id_: EngineId, folder: Path, launch: Launch = child.launch, bend: Bend | None = None
) -> RemoteEngine:
    """Start an engine in a process of its own. Raises EngineLost when that cannot be started.

    Args:
        bend: see `RemoteEngine`.
    """
    order = TypeAdapter(EngineOrder).dump_json(EngineOrder(config, id_, folder))
    environment = process_environment()
    if config.engine.kind == "vllm":
        threads = worker.threads_of(config, Architecture.from_folder(folder))
        environment |= vllm.environment(config.engine, threads, cpu=config.place.device == "cpu")
        environment = vllm.defaults(config.engine) | environment
    target, python = "rollyard.hosts:serve_engine", interpreter(config.engine)
    channel = await launch(target, order, name=f"engine {id_}", python=python, environment=environment)
    return remote_engine(config, id_, channel, bend=bend)


def remote_engine(
    config: Config, id_: EngineId, channel: Process, *, alone: bool = True, bend: Bend | None = None
) -> RemoteEngine:
    """The engine at the other end of a line; `alone`: no trainer is there."""
    able, start_s, limit = CAPABILITIES[config.engine.kind], config.engine.start_s, config.weights.limit_s
    limits = {"start_s": start_s, "sync_s": limit, "drain_s": worker.DRAIN_S}
    return RemoteEngine(id_, channel, able, **limits, alone=alone, bend=bend)


def attach_engine(config: Config, id_: EngineId, url: str, folder: Path) -> Engine:
    """An engine that is a running server."""
    from rollyard.engine.http import Client
    from rollyard.engine.sglang.engine import SGLangEngine
    from rollyard.model.tokenizer import Tokenizer

    shape, engine = Architecture.from_folder(folder), config.engine
    client = Client(url, engine_keys())
    if engine.kind == "vllm":
        return _vllm_engine(EngineOrder(config, id_, folder.resolve()), client)
    return SGLangEngine(
        id_,
        client,
        shape,
        Tokenizer(folder),
        slots=engine.slots,
        window=worker.window_of(config, shape),
        start_s=engine.start_s,
        sync_s=config.weights.limit_s,
        drain_s=worker.DRAIN_S,
    )


async def serve_engine(channel: Channel, order: bytes) -> None:
    """What the child runs: build the engine, serve it until the line ends."""
    ordered = TypeAdapter(EngineOrder).validate_json(order)
    vllm_ = ordered.config.engine.kind == "vllm"
    await serve(_vllm_engine(ordered) if vllm_ else await _embedded_engine(ordered), channel)


async def _embedded_engine(ordered: EngineOrder) -> Engine:
    """An engine whose parameters are its own; they come with the first load."""
    import torch

    from rollyard.model.folder import tensors
    from rollyard.model.tokenizer import Tokenizer
    from rollyard.model.transformer import CausalLM
    from rollyard.weights.merged import Merged

    config, id_, folder = ordered.config, ordered.id, ordered.folder
    shape = Architecture.from_folder(folder)
    device = DeviceThread()
    await device.run(worker.set_threads, worker.threads_of(config, shape))
    model = CausalLM(shape, getattr(torch, config.model.dtype), worker.device_of(config))
    receiver = worker.build_receiver(config, id_, model, model.head_weight.device, device.spans)
    if config.weights.what == "lora":
        base = await device.run(worker.load_model, config, folder)
        receiver = Merged(receiver, tensors(base), config.lora.scaling, model.stamp)
    policy = worker.Policy(model, Tokenizer(folder), folder)
    build = partial(worker.build_engine, config, id_, policy, device, receiver, sole=True, own=True)
    return await device.run(build)  # there, since it may compile


def _vllm_engine(ordered: EngineOrder, running: Client | None = None) -> Engine:
    """vLLM below this process, as its engine or as its server; or a server that is running."""
    from rollyard.engine.vllm.engine import VllmEngine

    shape = Architecture.from_folder(ordered.folder)
    return VllmEngine(
        ordered.id,
        _vllm_core(ordered, shape, running),
        ordered.folder,
        shape,
        slots=ordered.config.engine.slots,
        window=worker.window_of(ordered.config, shape),
        receiver="rollyard.hosts:vllm_receiver",
        order=TypeAdapter(EngineOrder).dump_json(ordered).decode(),
    )


def _vllm_core(ordered: EngineOrder, shape: Architecture, running: Client | None) -> Core:
    from rollyard.engine.http import Client
    from rollyard.engine.vllm.local import LocalCore
    from rollyard.engine.vllm.server import OwnServer, ServerCore
    from rollyard.model import adapter

    config, engine, window = ordered.config, ordered.config.engine, worker.window_of(ordered.config, shape)
    dtype = config.model.dtype if engine.dtype == "model" else engine.dtype
    lora = config.lora if config.weights.what == "lora" else None
    folder = base_of(ordered.folder)
    arguments = partial(vllm.arguments, folder, shape, engine, dtype, window, config.place.generate, lora)
    alpha = 0 if lora is None else lora.alpha
    if running is None and not engine.server:
        return LocalCore(arguments, alpha)
    blank = None if lora is None else partial(adapter.write_blank, shape, lora)
    own = None if running is not None else OwnServer(arguments, process_environment(), blank)
    client = running or Client("http://vllm", socket=own.socket if own is not None else "")
    limits, one_device = config.weights.limit_s, bool(running) and worker.transport_of(config) == "broadcast"
    return ServerCore(client, start_s=engine.start_s, sync_s=limits, window=window, one_device=one_device, own=own, alpha=alpha)


def vllm_receiver(order: str, device: torch.device, rank: int) -> Receiver:
    """Called inside vLLM's worker, by its name: the engine's side of the transport there.

    One of several workers needs a part of each tensor, which its loader copies out of the whole one: that stays on the CPU
    then, where it is mapped, for a device may not have room for it. (A broadcast brings the whole to the device all the same.)
    """
    import torch

    from rollyard.model.transformer import CausalLM

    ordered = TypeAdapter(EngineOrder).validate_json(order)
    config = ordered.config
    nowhere = CausalLM(Architecture.from_folder(ordered.folder), getattr(torch, config.model.dtype), "meta")
    if config.engine.tensor_parallel_size == 1:
        return worker.build_receiver(config, ordered.id, nowhere, device)
    where = device if worker.transport_of(config) == "broadcast" else torch.device("cpu")
    return worker.build_receiver(config, worker_name(ordered.id, rank), nowhere, where)
