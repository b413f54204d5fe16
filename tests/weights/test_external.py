"""What an external trainer publishes and says: believed as far as it can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollyard.errors import ConfigError, WeightSyncError
from rollyard.model.folder import infos, load, tensors
from rollyard.model.stamp import WeightStamp
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.types import TensorInfo, WeightVersion
from rollyard.weights import probe
from rollyard.weights.evidence import Evidence
from rollyard.weights.external import ExternalEvidence, ExternalSource
from rollyard.weights.prover import Prover
from tests.tiny import tiny_folder
from tests.weights.proving import Answering
from tests.weights.test_evidence import device, equal

__all__ = ["device"]  # a fixture

V0 = WeightVersion(0)
CPU = torch.device("cpu")
NAME = "model.layers.1.mlp.up_proj.weight"
Each = Callable[[dict[str, Tensor]], Iterator[tuple[str, Tensor]]]


class Stack:
    """Another stack's trainer, as far as weights are concerned."""

    def __init__(self, model: CausalLM) -> None:
        self.model, self.before = model, dict[str, Tensor]()
        self.each_of: Each = lambda found: iter(found.items())
        self.fails = ""

    def tensors(self) -> Sequence[TensorInfo]:
        return infos(tensors(self.model))

    def each(self) -> Iterator[tuple[str, Tensor]]:
        return self.each_of(tensors(self.model))

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        return probe.table(self.model)

    def move(self, moved: Mapping[str, Tensor]) -> None:
        own = tensors(self.model)
        for name, tensor in moved.items():
            self.before.setdefault(name, own[name].clone())
            own[name].copy_(tensor)
            if self.fails:
                raise OSError(self.fails)

    def restore(self) -> None:
        own = tensors(self.model)
        for name, tensor in self.before.items():
            own[name].copy_(tensor)
        self.before.clear()


def made(stack: Stack, device: DeviceThread) -> tuple[ExternalSource, ExternalEvidence]:
    source = ExternalSource(stack, stack.tensors(), WeightStamp(), CPU)  # type: ignore[arg-type]
    return source, ExternalEvidence(stack, source, stack.model.architecture, torch.float32, device)  # type: ignore[arg-type]


async def roll_to(engine: CausalLM, source: ExternalSource, device: DeviceThread, frozen: str = "") -> Callable[..., object]:
    """Brings what is published to an engine, but for one tensor."""

    async def roll(version: WeightVersion) -> None:
        def bring() -> None:
            for name, tensor in source.each(version):
                if name != frozen:
                    tensors(engine)[name].copy_(tensor)

        await device.run(bring)

    return roll


async def test_the_canary_is_that_of_our_own_trainer(tmp_path: Path, device: DeviceThread) -> None:
    folder = tiny_folder(tmp_path)
    stack, engine, own = Stack(load(folder)), load(folder), load(folder)
    source, evidence = made(stack, device)
    asking, roll = Answering(device, {"e0": engine}), await roll_to(engine, source, device)
    found = await Prover(evidence, asking).prove(["e0"], V0, roll)  # type: ignore[arg-type]

    async def nowhere(version: WeightVersion) -> None: ...

    assert found == await Prover(Evidence(own, device), Answering(device, {"e0": own})).prove(["e0"], V0, nowhere)
    assert found.unseen == () and equal(stack.model, own) and equal(engine, own) and source.stamp.whole


async def test_a_tensor_that_an_engine_never_takes_is_named(tmp_path: Path, device: DeviceThread) -> None:
    folder = tiny_folder(tmp_path)
    stack, engine = Stack(load(folder)), load(folder)
    source, evidence = made(stack, device)
    roll = await roll_to(engine, source, device, NAME)
    with pytest.raises(WeightSyncError, match=rf"as if {NAME} had stayed as it was"):
        await Prover(evidence, Answering(device, {"e0": engine})).prove(["e0"], V0, roll)  # type: ignore[arg-type]
    assert equal(stack.model, load(folder))


async def test_one_that_publishes_what_it_does_not_compute_with(tmp_path: Path, device: DeviceThread) -> None:
    """The engine agrees with what came; the trainer itself does not."""
    folder = tiny_folder(tmp_path)
    stack = Stack(load(folder))
    stack.each_of = lambda found: iter((found | {NAME: found[NAME].flip(0)}).items())
    _, evidence = made(stack, device)
    with pytest.raises(WeightSyncError, match=r"publishes something else than it computes with: .* nats between"):
        await evidence.begin({"e0": ()})


async def test_a_move_that_fails_is_undone(tmp_path: Path, device: DeviceThread) -> None:
    folder = tiny_folder(tmp_path)
    stack, engine = Stack(load(folder)), load(folder)
    source, evidence = made(stack, device)
    stack.fails = "no memory"
    roll = await roll_to(engine, source, device)
    with pytest.raises(WeightSyncError, match="the external trainer failed in move: OSError: no memory"):
        await Prover(evidence, Answering(device, {"e0": engine})).prove(["e0"], V0, roll)  # type: ignore[arg-type]
    assert equal(stack.model, load(folder)) and source.stamp.whole
    await evidence.restore()  # harmless


@pytest.mark.parametrize(
    ("each", "told"),
    [
        (lambda found: iter(list(found.items())[:-1]), "the external trainer stopped before model.norm.weight"),
        (lambda found: iter([*found.items(), ("more", found[NAME])]), "gave more tensors than it announced: more"),
        (lambda found: iter((found | {NAME: found[NAME][:1]}).items()), rf"{NAME} was sent as \[1, 64\] float32"),
        (lambda found: iter((found | {NAME: found[NAME].bfloat16()}).items()), rf"{NAME} was sent as .* bfloat16"),
    ],
)
async def test_what_comes_is_looked_at(tmp_path: Path, device: DeviceThread, each: Each, told: str) -> None:
    stack = Stack(load(tiny_folder(tmp_path)))
    stack.each_of = each
    source, _ = made(stack, device)
    with pytest.raises(WeightSyncError, match=told):
        list(source.each(V0))


async def test_one_that_cannot_give_a_tensor(tmp_path: Path, device: DeviceThread) -> None:
    def broken(found: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        yield next(iter(found.items()))
        raise ValueError("rank 3 is gone")

    stack = Stack(load(tiny_folder(tmp_path)))
    stack.each_of = broken
    source, _ = made(stack, device)
    with pytest.raises(WeightSyncError, match=r"failed at model.embed_tokens.weight or the next: ValueError: rank 3 is gone"):
        list(source.each(V0))
    with pytest.raises(WeightSyncError, match="failed half way"), source.stamp.writing():
        list(source.each(V0))


def test_tensors_that_engines_do_not_have(tmp_path: Path) -> None:
    stack = Stack(load(tiny_folder(tmp_path)))
    others = [info._replace(dtype="torch.bfloat16") for info in stack.tensors()]
    with pytest.raises(ConfigError, match=r"train.adapter: its tensors are not the engines': model.embed_tokens.weight was sent"):
        ExternalSource(stack, others, WeightStamp(), CPU)  # type: ignore[arg-type]
