"""The engines that the suite is run with. A new one is a function that yields a `Served`, and its entry in `MAKERS`.

What an engine can do is not told here: the suite asks its capabilities, and expects what they promise or a refusal.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from rollyard import hosts
from rollyard.config import Config, EngineConfig, PlaceConfig, WeightsConfig
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.embedded.engine import EmbeddedEngine
from rollyard.engine.fake import FakeEngine, OnLoad, Script
from rollyard.engine.host import serve
from rollyard.engine.openai.client import OpenAIClient
from rollyard.engine.openai.engine import OpenAIEngine
from rollyard.engine.openai.limits import Limits
from rollyard.engine.remote import RemoteEngine
from rollyard.errors import WeightSyncError
from rollyard.model.architecture import Architecture
from rollyard.model.folder import load
from rollyard.model.tokenizer import Tokenizer
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.protocols.rollouts import Engine
from rollyard.protocols.weights import Publisher
from rollyard.types import Manifest, Request, WeightVersion
from rollyard.weights.checkpoint import CheckpointPublisher, CheckpointReceiver
from rollyard.weights.flat import model_infos
from rollyard.weights.in_place import InPlace
from rollyard.weights.shared_memory import SharedMemoryPublisher
from rollyard.weights.source import OwnSource
from tests import compiler
from tests.engine import openai_double
from tests.engine.contract.model import WINDOW, model_of
from tests.engine.sglang.attached import adapter
from tests.engine.sglang.folder import OWN_TOKENS, roomy
from tests.engine.sglang_double import double
from tests.place.lines import joined

Change = Callable[[Path, WeightVersion], Awaitable[None]]


@dataclass(frozen=True)
class Options:
    slots: int = 4
    window: int = WINDOW


@dataclass(frozen=True)
class Served:
    """A started engine that has acknowledged no weights."""

    engine: Engine
    change: Change  # the weights of a folder become a version of it, as in a run: prepared, then loaded
    spoil: Change  # the same, but what carries them breaks on the way: raises WeightSyncError


@dataclass(frozen=True)
class Maker:
    """Args:
    open: starts an engine for a model folder; scratch space is the second folder.
    partner: another maker, whose engine goes on with what this one was cut at. Of the same kind where noise is promised.
    model: it decodes with the folder's weights; False: it writes what it is told, with made-up logprobs.
    marks: of pytest, for an engine with a lane of its own or that some machines lack.
    """

    open: Callable[[Path, Path, Options], AbstractAsyncContextManager[Served]]
    partner: str = "embedded-plain"
    model: bool = True
    marks: tuple[pytest.MarkDecorator, ...] = ()


# --------------------------------------------------------------------------------------------------- fake


@asynccontextmanager
async def fake(folder: Path, scratch: Path, options: Options) -> AsyncIterator[Served]:
    """Its scripts are what transformers writes with the weights that it was given last; samples follow from the seed."""
    now = folder

    def script(request: Request) -> Script:
        if request.sampling.temperature:
            return Script(tuple(Random(request.seed).choices(range(2, 40), k=WINDOW)))
        model = model_of(now)
        tokens = model.greedy(request)
        return Script(tuple(tokens if model.ended(request, tokens) else [*tokens, 0]))  # a script's last token ends it

    engine = FakeEngine("fake", slots=options.slots, window=options.window, script=script)

    async def change(wanted: Path, version: WeightVersion) -> None:
        nonlocal now
        await engine.prepare(Manifest(version, (), 0))
        await engine.load(version)
        now = wanted

    async def spoil(wanted: Path, version: WeightVersion) -> None:
        engine.on_load = OnLoad.REFUSE
        try:
            await change(wanted, version)
        finally:
            engine.on_load = OnLoad.TAKE

    try:
        await engine.start()
        yield Served(engine, change, spoil)
    finally:
        await engine.close()


# ----------------------------------------------------------------------------------------------- embedded


class BreakingInPlace(InPlace):
    """Breaks when the engine has prepared and switches."""

    broken = False

    def take(self, version: WeightVersion) -> None:
        if self.broken:
            raise WeightSyncError("the receiver broke")
        super().take(version)


@asynccontextmanager
async def embedded(folder: Path, scratch: Path, options: Options, *, kernels: str) -> AsyncIterator[Served]:
    """In this process, with the trainer's own parameters."""
    device = DeviceThread(partial(torch.set_num_threads, 1))
    model = load(folder)
    receiver = BreakingInPlace(model)
    config = engine_config(options, kernels=kernels)
    engine = EmbeddedEngine("embedded", model, Tokenizer(folder), device, receiver, config, options.window)

    async def bring(version: WeightVersion) -> None:
        await engine.prepare(await receiver.publish(version))
        await engine.load(version)

    async def change(wanted: Path, version: WeightVersion) -> None:
        await device.run(retrain, model, wanted)
        await bring(version)

    async def spoil(wanted: Path, version: WeightVersion) -> None:
        receiver.broken = True
        try:
            await bring(version)
        finally:
            receiver.broken = False

    try:
        await engine.start()
        yield Served(engine, change, spoil)
    finally:
        await engine.close()
        device.close()


@asynccontextmanager
async def embedded_link(folder: Path, scratch: Path, options: Options) -> AsyncIterator[Served]:
    """At the other end of a line, with memory of its own, and still in this process. Weights travel as files."""
    async with sending(folder, partial(_checkpoints, folder, scratch)) as sender:
        device = DeviceThread(partial(torch.set_num_threads, 1))
        model = CausalLM(Architecture.from_folder(folder), torch.float32, "cpu")
        receiver = CheckpointReceiver(model_infos(model), torch.device("cpu"))
        config = engine_config(options)
        inner = EmbeddedEngine("inner", model, Tokenizer(folder), device, receiver, config, options.window, sole=True)
        near, far = await joined("the engine", "the run")
        serving = asyncio.create_task(serve(inner, far))
        engine = RemoteEngine("linked", near, CAPABILITIES["embedded"], start_s=30, sync_s=30, drain_s=30)
        try:
            await engine.start()
            yield sender.served(engine)
        finally:
            await engine.close()
            await serving
            await far.close()
            device.close()


@asynccontextmanager
async def child(folder: Path, scratch: Path, options: Options, **engine_options: object) -> AsyncIterator[Served]:
    """In a process of its own, as a run launches it. Weights travel through shared memory."""
    config = Config(
        engine=engine_config(options, **engine_options),
        place=PlaceConfig(placement="separate", threads=1, device="cpu"),
        weights=WeightsConfig(transport="shared_memory", limit_s=60),
    )
    async with sending(folder, _shared_memory) as sender:
        engine = await hosts.launch_engine(config, "child", folder)
        try:
            await engine.start()
            yield sender.served(engine)
        finally:
            await engine.close()


def engine_config(options: Options, **more: object) -> EngineConfig:
    # Few tokens a page, so that there are many.
    return EngineConfig.model_validate({"slots": options.slots, "window": options.window, "page_tokens": 4, **more})


def retrain(model: CausalLM, folder: Path) -> None:
    """The parameters become those of the folder, where they are."""
    with torch.no_grad(), model.stamp.writing():
        for parameter, wanted in zip(model.parameters(), load(folder).parameters(), strict=True):
            parameter.copy_(wanted)


# ------------------------------------------------------------------------------------------------ sglang

SERVERS = os.environ.get("SGLANG_URL", "").split()  # of real ones; how they are started: tests/engine/sglang/folder.py


@asynccontextmanager
async def sglang(folder: Path, scratch: Path, options: Options, **release: object) -> AsyncIterator[Served]:
    """A double of its server, that speaks as one release or another."""
    server = double(roomy(folder, scratch), context=WINDOW + OWN_TOKENS, slots=options.slots, memory_saver=True, **release)
    async with server as up, attached_to(up.url, folder, scratch, options) as served:
        yield served


@asynccontextmanager
async def sglang_real(folder: Path, scratch: Path, options: Options) -> AsyncIterator[Served]:
    """A server that somebody started, for one engine at a time."""
    assert SERVERS, "SGLANG_URL names fewer servers than the suite uses at a time: two"
    url = SERVERS.pop()
    try:
        async with attached_to(url, folder, scratch, options) as served:
            yield served
    finally:
        SERVERS.append(url)


@asynccontextmanager
async def attached_to(url: str, folder: Path, scratch: Path, options: Options) -> AsyncIterator[Served]:
    """The adapter. Weights travel as folders."""
    engine = adapter(url, folder, slots=options.slots, window=options.window)

    async def change(wanted: Path, version: WeightVersion) -> None:
        await engine.prepare(Manifest(version, (), 0, str(wanted)))
        await engine.load(version)

    async def spoil(wanted: Path, version: WeightVersion) -> None:
        """The weights are gone when the server comes to read them."""
        empty = scratch / f"empty-{os.urandom(4).hex()}"
        shutil.copytree(wanted, empty, ignore=shutil.ignore_patterns("*.safetensors"))
        await change(empty, version)

    try:
        await engine.start()
        yield Served(engine, change, spoil)
    finally:
        await engine.close()


# ------------------------------------------------------------------------------------------------ openai


@asynccontextmanager
async def openai(folder: Path, scratch: Path, options: Options) -> AsyncIterator[Served]:
    """A double of a server that gives token ids and processed logprobs, as vLLM can. Nobody can change its weights."""
    async with openai_double.double(folder, slots=options.slots, window=options.window) as server:
        client = OpenAIClient([server.address], "tiny", limits=Limits(total_s=30.0, backoff_s=0.01))
        engine = OpenAIEngine("openai", client, Tokenizer(folder))

        async def change(wanted: Path, version: WeightVersion) -> None:
            await engine.prepare(Manifest(version, (), 0))

        try:
            await engine.start()
            yield Served(engine, change, change)
        finally:
            await engine.close()


# ---------------------------------------------------------------------------------- the trainer's side


class Sender:
    """A model in training, and a transport from it to one engine."""

    def __init__(self, model: CausalLM, device: DeviceThread, publisher: Publisher) -> None:
        self._model, self._device, self._publisher = model, device, publisher

    def served(self, engine: Engine) -> Served:
        return Served(engine, partial(self._change, engine), partial(self._spoil, engine))

    async def _change(self, engine: Engine, folder: Path, version: WeightVersion) -> None:
        manifest = await self._offer(engine, folder, version)
        await asyncio.gather(engine.prepare(manifest), self._publisher.deliver())
        await engine.load(version)
        self._publisher.taken(engine.id, version)

    async def _spoil(self, engine: Engine, folder: Path, version: WeightVersion) -> None:
        """One tensor is another than was announced."""
        manifest = await self._offer(engine, folder, version)
        *sent, last = manifest.fingerprints
        await engine.prepare(replace(manifest, fingerprints=(*sent, last + 1)))

    async def _offer(self, engine: Engine, folder: Path, version: WeightVersion) -> Manifest:
        await self._device.run(retrain, self._model, folder)
        return await self._publisher.publish(version, [engine.id])


@asynccontextmanager
async def sending(folder: Path, publisher: Callable[[CausalLM, DeviceThread], Publisher]) -> AsyncIterator[Sender]:
    """A transport for an engine that keeps `protocols.Receiver`: shared memory, a checkpoint, a broadcast."""
    device = DeviceThread(partial(torch.set_num_threads, 1))
    model = load(folder)
    made = publisher(model, device)
    try:
        yield Sender(model, device, made)
    finally:
        made.close()
        device.close()


def _shared_memory(model: CausalLM, device: DeviceThread) -> Publisher:
    return SharedMemoryPublisher(OwnSource.of(model), device)


def _checkpoints(folder: Path, scratch: Path, model: CausalLM, device: DeviceThread) -> Publisher:
    return CheckpointPublisher(OwnSource.of(model), device, folder, scratch / f"weights-{os.urandom(4).hex()}")


OTHER = "embedded-native" if compiler.FOUND else "embedded-plain"
MAKERS: dict[str, Maker] = {
    "fake": Maker(fake, partner="fake", model=False),
    "embedded-native": Maker(partial(embedded, kernels="native"), marks=(compiler.needs_compiler,)),
    "embedded-plain": Maker(partial(embedded, kernels="plain"), partner=OTHER),
    "embedded-link": Maker(embedded_link, partner=OTHER),
    "embedded-child": Maker(child, partner=OTHER),
    # Short pages, so that a small window holds several.
    "vllm": Maker(partial(child, kind="vllm", extra='{"block_size": 32}'), marks=(pytest.mark.vllm, pytest.mark.timeout(300))),
    "vllm-server": Maker(
        partial(child, kind="vllm", server=True, extra='{"block_size": 32}'), marks=(pytest.mark.vllm, pytest.mark.timeout(300))
    ),
    "sglang": Maker(partial(sglang, incremental=True)),
    "sglang-0.5.6": Maker(partial(sglang, version="0.5.6", deterministic=True), partner="sglang-0.5.6"),
    "openai": Maker(openai),
    **({"sglang-real": Maker(sglang_real)} if SERVERS else {}),
}
