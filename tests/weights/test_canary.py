"""The canary catches every tensor that stays behind; the probe tells new weights from old ones, or says that it cannot."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollyard.config import EngineConfig
from rollyard.engine.embedded.engine import EmbeddedEngine
from rollyard.errors import WeightSyncError
from rollyard.events import Rollover
from rollyard.model.folder import load
from rollyard.model.tokenizer import Tokenizer
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.types import Answer, Completion, FinishReason, Manifest, Request, Verdict, WeightVersion
from rollyard.weights import canary, probe
from rollyard.weights.evidence import Evidence, Tables
from rollyard.weights.flat import model_infos
from rollyard.weights.in_place import InPlace
from rollyard.weights.prover import Prover
from rollyard.weights.shared_memory import SharedMemoryPublisher, SharedMemoryReceiver
from rollyard.weights.source import OwnSource
from tests.compiler import needs_compiler
from tests.engine.embedded.serving import collect
from tests.tiny import tiny_folder
from tests.weights.moving import CPU

V0, V1 = WeightVersion(0), WeightVersion(1)


class Freezing(SharedMemoryReceiver):
    """Keeps one tensor as it was first, whatever arrives."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model_infos(model), CPU)
        self.frozen = ""
        self._first: dict[str, torch.Tensor] = {}

    def take(self, version: WeightVersion) -> Mapping[str, torch.Tensor]:
        arrived = dict(super().take(version))
        if not self._first:
            self._first = {name: tensor.clone() for name, tensor in arrived.items()}
        return arrived | ({self.frozen: self._first[self.frozen]} if self.frozen else {})


@dataclass
class Pair:
    """A trainer's model, and an engine with weights of its own."""

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


async def ask(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Completion]:
    engine.generate(requests)
    written = await collect(engine, len(requests))
    return [
        Completion(
            each.id.group, 0, tuple(written[each.id].token_ids), tuple(written[each.id].logprobs), (), FinishReason.LENGTH, ""
        )
        for each in requests
    ]


@asynccontextmanager
async def pair(folder: Path, dtype: torch.dtype, kernels: str) -> AsyncIterator[Pair]:
    device, other = DeviceThread(lambda: torch.set_num_threads(1)), DeviceThread(lambda: torch.set_num_threads(1))
    model, own = load(folder, dtype), CausalLM(load(folder).architecture, dtype)
    publisher, receiver = SharedMemoryPublisher(OwnSource.of(model), device), Freezing(own)
    options = EngineConfig.model_validate({"slots": 16, "page_tokens": 4, "kernels": kernels})
    engine = EmbeddedEngine("engine-0", own, Tokenizer(folder), other, receiver, options, 64, sole=True)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "kernels"),
    [
        pytest.param("llama", True, "native", marks=needs_compiler),
        ("qwen2", False, "plain"),
        pytest.param("qwen3", True, "native", marks=needs_compiler),
    ],
)
async def test_each_tensor_that_stays_behind_is_caught_and_named(tmp_path: Path, family: str, tied: bool, kernels: str) -> None:
    """In bfloat16, where a step at a learning rate of 1e-6 would not show: the canary's moves do."""
    folder = tiny_folder(tmp_path, family=family, tied=tied)
    async with pair(folder, torch.bfloat16, kernels) as both:
        found = await both.prover.prove(["engine-0"], V0, both.roll)
        assert found.gap <= found.limit and found.unseen == () and found.tensors == len(list(both.model.parameters()))
        for name, _ in both.model.named_parameters():
            both.receiver.frozen = name
            with pytest.raises(WeightSyncError, match="engine-0 does not decode with all the weights that it was sent") as told:
                await both.prover.prove(["engine-0"], V0, both.roll)
            assert name in str(told.value)
            both.receiver.frozen = ""
            await both.roll(V0)


async def test_parameters_are_as_they_were_bit_for_bit(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model, before = load(folder, torch.bfloat16), load(folder, torch.bfloat16)
    generation, kept = model.stamp.generation, canary.keep(model)
    moved = canary.move(model, kept, kept, attempt=1, limit=0.03)
    assert all(not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert torch.isfinite(moved.table).all() and canary.answer_to_rounding(model) > 0
    canary.restore(model, kept)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert model.stamp.generation > generation  # no engine decodes with what it took before or meanwhile


async def test_a_tied_embedding_is_looked_at_as_lookup_and_as_head(tmp_path: Path) -> None:
    """Beside a model that has two tensors where this one has one."""
    model = load(tiny_folder(tmp_path))
    kept = canary.keep(model)
    canary.move(model, kept, kept, attempt=1, limit=0.1)
    arch = replace(model.architecture, tied=False)
    untied = CausalLM(arch)
    with torch.no_grad(), untied.stamp.writing():
        for name, parameter in untied.named_parameters():
            parameter.copy_(dict(model.named_parameters()).get(name, model.head_weight))
        head, lookup = canary._halves_put_back(model, kept)
        untied.lm_head.weight.copy_(kept["model.embed_tokens.weight"])
        assert torch.allclose(probe.table(untied), head, atol=1e-5)
        untied.lm_head.weight.copy_(model.head_weight)
        untied.model.embed_tokens.weight.copy_(kept["model.embed_tokens.weight"])
        assert torch.allclose(probe.table(untied), lookup, atol=1e-5)
    assert not torch.allclose(head, probe.table(model), atol=1e-3)


async def test_only_the_named_tensors_move(tmp_path: Path) -> None:
    model = load(tiny_folder(tmp_path))
    kept = canary.keep(model)
    canary.move(model, kept, kept, attempt=1, limit=0.03)
    canary.move(model, kept, ["model.norm.weight"], attempt=2, limit=0.03)
    assert [name for name, value in model.named_parameters() if not torch.equal(value, kept[name])] == ["model.norm.weight"]


async def test_the_trainers_table_is_that_of_transformers(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    ids = torch.tensor(probe.prompts(load(folder).architecture.vocab_size))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits[:, -1].log_softmax(-1)
    assert torch.allclose(probe.table(load(folder)), expected, atol=1e-4)


async def test_a_tensor_shows_at_least_what_is_said(tmp_path: Path) -> None:
    """The estimate from one gradient, beside the real thing: the logprobs with that one tensor put back."""
    model = load(tiny_folder(tmp_path))
    kept = canary.keep(model)
    for name, parameter in model.named_parameters():
        moved = canary.move(model, kept, [name], attempt=1, limit=0.001)
        with torch.no_grad():
            parameter.copy_(kept[name])
        difference = (probe.table(model) - moved.table).gather(1, moved.table.argmax(dim=1, keepdim=True))
        assert float(difference.square().mean().sqrt()) > 0.5 * moved.shows[name] > 2 * canary.LEAST_LIMIT


def table(*logprobs: float) -> torch.Tensor:
    """One column: a single token."""
    return torch.tensor(logprobs)[:, None]


def answers(*logprobs: float) -> list[Answer]:
    return [Answer(0, value) for value in logprobs]


def test_verdicts_by_hand() -> None:
    new, old, first = table(-1.0, -2.0), {V0: table(-1.1, -2.1)}, {V0: table(-1.5, -2.5), V1: table(-1.1, -2.1)}
    assert probe.distance(answers(-1.0, -2.0), old[V0]) == pytest.approx(0.1)
    assert probe.distance(answers(-1.3, -1.6), table(-1.0, -2.0)) == pytest.approx((0.5 * (0.09 + 0.16)) ** 0.5)
    assert probe.judge(answers(-1.0, -2.0), new, old, 0.01).verdict is Verdict.VERIFIED
    assert probe.judge(answers(-1.1, -2.1), new, old, 0.01).verdict is Verdict.CONTRADICTED
    assert probe.judge(answers(-1.0, -2.0), new, old, 0.06).verdict is Verdict.UNDECIDABLE  # 0.1 is less than twice the noise
    assert probe.judge(answers(-1.0, -2.0), new, {V0: new}, 0.0).verdict is Verdict.UNDECIDABLE
    assert probe.judge(answers(float("nan"), -2.0), new, old, 0.01).verdict is not Verdict.VERIFIED
    found = probe.judge(answers(-1.5, -2.5), new, first, 0.01)
    assert (found.verdict, found.other, found.new) == (Verdict.CONTRADICTED, V0, pytest.approx(0.5))  # of three, the first
    assert probe.judge(answers(-1.0, -2.0), new, first, 0.01).verdict is Verdict.VERIFIED
    found = probe.judge(answers(-3.0, -4.0), new, {V0: table(0.0, -1.0)}, 0.01)
    assert (found.verdict, found.other) == (Verdict.CONTRADICTED, None)  # nearer its own, and yet none that is known


def test_tables_of_the_first_version_and_the_last_two_are_known() -> None:
    tables, column = Tables("torch.float32"), {number: table(-float(number), -float(number)) for number in range(1, 6)}
    for number in range(1, 6):
        tables.published(WeightVersion(number), column[number])

    def verdict(number: int, *versions: int) -> tuple[Verdict, WeightVersion | None]:
        said = [replace(each, version=WeightVersion(v)) for each, v in zip(answers(-number, -number), versions, strict=True)]
        found = tables.check("e", said)
        return found.verdict, found.other

    assert verdict(5, 5, 5)[0] is Verdict.VERIFIED and verdict(4, 4, 4)[0] is Verdict.VERIFIED
    assert verdict(1, 5, 5) == (Verdict.CONTRADICTED, WeightVersion(1)) and verdict(4, 5, 5)[1] == WeightVersion(4)
    assert verdict(1, 4, 4) == (Verdict.CONTRADICTED, WeightVersion(1))
    assert verdict(3, 3, 3)[0] is Verdict.UNDECIDABLE  # forgotten
    assert verdict(1, 4, 5)[0] is Verdict.UNDECIDABLE  # it took new weights between two answers
    assert tables.check("e", answers(-1.0, -1.0)).verdict is Verdict.CONTRADICTED  # of no version in particular: the newest


async def test_an_engine_that_stays_at_old_weights_is_contradicted(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    async with pair(folder, torch.float32, "auto") as both:
        await both.prover.published(V0)
        assert await both.prover.check("engine-0") is Verdict.UNDECIDABLE  # there is no version before
        with both.model.stamp.writing(), torch.no_grad():
            for parameter in both.model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.01)
        await both.prover.published(V1)
        told = "engine-0 says that it has version 1, and decodes with other weights, those of version 0"
        with pytest.raises(WeightSyncError, match=told):
            await both.prover.check("engine-0")
        await both.roll(V1)
        assert await both.prover.check("engine-0") is Verdict.VERIFIED


async def test_weights_that_did_not_change_cannot_be_told_apart(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    async with pair(folder, torch.float32, "auto") as both:
        await both.prover.published(V0)
        await both.roll(V1)
        await both.prover.published(V1)
        assert await both.prover.check("engine-0") is Verdict.UNDECIDABLE


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_in_place_the_canary_moves_the_shared_parameters_and_back(tmp_path: Path, dtype: str) -> None:
    folder = tiny_folder(tmp_path)
    model, before = load(folder), load(folder)
    device, shared = DeviceThread(lambda: torch.set_num_threads(1)), InPlace(model)
    engine = EmbeddedEngine("engine-0", model, Tokenizer(folder), device, shared, EngineConfig(slots=16, dtype=dtype), 64)
    await engine.start()

    async def roll(version: WeightVersion) -> None:
        manifest: Manifest = await shared.publish(version)
        await engine.prepare(manifest)
        await engine.load(version)

    try:
        await roll(V0)
        prover = Prover(Evidence(model, device), lambda _, asked: ask(engine, asked))
        found = await prover.prove(["engine-0"], V0, roll)
        assert found.gap <= found.limit and (found.noise < 1e-5) == (dtype == "float32") and not found.unseen
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
        assert engine.version == V0
    finally:
        await engine.close()
        device.close()
