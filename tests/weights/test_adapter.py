"""Only an adapter travels, and engines decode with what it makes of the weights: every tensor of it is looked after."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from rollyard.config import EngineConfig, LoraConfig
from rollyard.engine.embedded.engine import EmbeddedEngine
from rollyard.errors import StaleWeights, WeightSyncError
from rollyard.events import Rollover
from rollyard.model import adapter
from rollyard.model.folder import load, tensors
from rollyard.model.tokenizer import Tokenizer
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.types import Verdict, WeightVersion
from rollyard.weights import canary, merged
from rollyard.weights.evidence import Evidence
from rollyard.weights.merged import Merged
from rollyard.weights.prover import Prover
from rollyard.weights.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from rollyard.weights.source import OwnSource
from tests.compiler import needs_compiler
from tests.tiny import tiny_folder
from tests.weights.hosts import Freezing
from tests.weights.moving import CPU
from tests.weights.test_canary import V0, V1, ask

Tensors = Mapping[str, torch.Tensor]
LORA = LoraConfig(rank=4, alpha=8)


@dataclass
class Pair:
    """A trainer's model with an adapter, and an engine with merged weights of its own."""

    model: CausalLM
    publisher: SharedMemoryPublisher
    engine: EmbeddedEngine
    receiver: Freezing
    prover: Prover

    async def roll(self, version: WeightVersion) -> None:
        await self.engine.prepare(await self.publisher.publish(version, (self.engine.id,)))
        await self.engine.pause(Rollover.DRAIN)
        await self.engine.load(version)
        self.publisher.taken(self.engine.id, version)
        await self.engine.resume()


@asynccontextmanager
async def pair(folder: Path, dtype: torch.dtype = torch.float32, kernels: str = "plain") -> AsyncIterator[Pair]:
    device, other = DeviceThread(lambda: torch.set_num_threads(1)), DeviceThread(lambda: torch.set_num_threads(1))
    model, base = load(folder, dtype), load(folder, dtype)
    own = CausalLM(base.architecture, dtype)
    adapter.add(model, LORA, seed=0)
    receiver = Freezing(SharedMemoryReceiver(adapter.infos(own, LORA), CPU))
    made_whole = Merged(receiver, tensors(base), LORA.scaling, own.stamp)
    publisher = SharedMemoryPublisher(OwnSource.of(model), device)
    options = EngineConfig.model_validate({"slots": 16, "page_tokens": 4, "kernels": kernels})
    engine = EmbeddedEngine("engine-0", own, Tokenizer(folder), other, made_whole, options, 64, sole=True)
    await engine.start()
    made = Pair(model, publisher, engine, receiver, Prover(Evidence(model, device), lambda _, asked: ask(engine, asked)))
    try:
        await made.roll(V0)
        yield made
    finally:
        await engine.close()
        publisher.close()
        device.close()
        other.close()


def train(model: CausalLM, scale: float) -> None:
    """What a step does to an adapter."""
    generator = torch.Generator().manual_seed(1)
    with model.stamp.writing(), torch.no_grad():
        for tensor in model.trained().values():
            tensor.add_(torch.empty(tensor.shape).normal_(0.0, scale, generator=generator))


@pytest.mark.parametrize("begun", [False, True], ids=["B is zeros", "B has an effect"])
@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [(torch.float32, "plain"), pytest.param(torch.bfloat16, "native", marks=[needs_compiler, pytest.mark.slow])],
)
async def test_each_tensor_that_stays_behind_is_caught_and_named(
    tmp_path: Path, dtype: torch.dtype, kernels: str, begun: bool
) -> None:
    folder = tiny_folder(tmp_path, layers=1)
    async with pair(folder, dtype, kernels) as both:
        if begun:
            train(both.model, 0.05)
            both.receiver._first.clear()  # what stays behind is this
            await both.roll(V0)
        before = {name: tensor.clone() for name, tensor in both.model.state_dict().items()}
        found = await both.prover.prove(["engine-0"], V0, both.roll)
        assert found.gap <= found.limit and found.unseen == () and found.tensors == len(both.model.trained())
        for name in both.model.trained():
            both.receiver.frozen = name
            with pytest.raises(WeightSyncError, match="engine-0 does not decode with all the weights that it was sent") as told:
                await both.prover.prove(["engine-0"], V0, both.roll)
            assert name in str(told.value)
            both.receiver.frozen = ""
            await both.roll(V0)
        assert all(torch.equal(before[name], tensor) for name, tensor in both.model.state_dict().items())  # the base too


def test_what_has_no_gradient_moves_with_what_gives_it_one(tmp_path: Path) -> None:
    """A is asked for alone, and B is zeros: both move, and only A is said to show."""
    model = load(tiny_folder(tmp_path))
    adapter.add(model, LORA, seed=0)
    kept = canary.keep(model)
    assert kept.keys() == model.trained().keys()
    name = "model.layers.1.mlp.up_proj.lora_A.weight"
    moved = canary.move(model, kept, [name], attempt=2, limit=1e-3)
    assert moved.shows.keys() == {name} and moved.shows[name] > 1e-3
    changed = {each for each, tensor in model.trained().items() if not torch.equal(tensor.cpu(), kept[each])}
    assert changed == {name, adapter.partner(name)}


def test_the_answer_to_rounding_is_that_of_all_weights(tmp_path: Path) -> None:
    """An adapter whose B is zeros would round without any effect. What is frozen is as before, bit for bit."""
    model = load(tiny_folder(tmp_path))
    adapter.add(model, LORA, seed=0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert canary.answer_to_rounding(model) > 1e-3
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


async def test_the_probe_tells_versions_of_an_adapter(tmp_path: Path) -> None:
    async with pair(tiny_folder(tmp_path)) as both:
        await both.prover.published(V0)
        assert await both.prover.check("engine-0") is Verdict.UNDECIDABLE  # there is none before it
        train(both.model, 0.05)
        await both.roll(V1)
        await both.prover.published(V1)
        assert await both.prover.check("engine-0") is Verdict.VERIFIED
        train(both.model, 0.05)
        await both.prover.published(WeightVersion(2))  # and is never brought to the engine
        with pytest.raises(WeightSyncError, match="decodes with other weights, those of version 1"):
            await both.prover.check("engine-0")


async def test_many_versions_leave_nothing_behind(tmp_path: Path) -> None:
    """Merged anew of the base each time: once an adapter has no effect again, an engine in bfloat16 says what it first said."""
    async with pair(tiny_folder(tmp_path), torch.bfloat16) as both:
        first = await both.prover._answers("engine-0")
        for step in range(20):
            train(both.model, 0.05)
            await both.roll(WeightVersion(step))
        assert await both.prover._answers("engine-0") != first
        with both.model.stamp.writing(), torch.no_grad():
            for name, tensor in both.model.trained().items():
                if adapter.B in name:
                    tensor.zero_()
        await both.roll(WeightVersion(99))
        assert await both.prover._answers("engine-0") == first


async def test_nobody_decodes_with_weights_that_were_merged_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path, layers=1)
    async with pair(folder) as both:
        train(both.model, 0.05)
        merge, own = adapter.merge, both.engine._model

        def failing(weights: Tensors, changes: Tensors, scaling: float, memory: dict[str, torch.Tensor]) -> None:
            next(iter(memory.values())).zero_()
            raise RuntimeError("out of memory")

        monkeypatch.setattr(merged, "merge", failing)
        with pytest.raises(WeightSyncError, match="the adapter of version 1 cannot be merged: out of memory"):
            await both.roll(V1)
        assert both.engine.version == V0
        with pytest.raises(StaleWeights):
            own.stamp.check(own.stamp.generation)
        monkeypatch.setattr(merged, "merge", merge)
        await both.engine.load(V1)
        own.stamp.check(own.stamp.generation)
        wanted = merge(adapter.base(both.model), tensors(both.model), LORA.scaling, {})
        assert all(torch.equal(parameter, wanted[name]) for name, parameter in own.named_parameters())
