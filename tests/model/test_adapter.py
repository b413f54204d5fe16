"""An adapter in the policy against PEFT around the same model in transformers."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollyard.config import LoraConfig
from rollyard.errors import ConfigError
from rollyard.model import adapter
from rollyard.model.architecture import Architecture, base_of
from rollyard.model.attention import Tree, packed_attention
from rollyard.model.flops import adapter_numbers
from rollyard.model.folder import infos, load, save, tensors
from rollyard.model.transformer import CausalLM
from tests.tiny import tiny_folder

# PEFT 0.21 around a model of transformers 5.24.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

LORA = LoraConfig(rank=4, alpha=8)
IDS = torch.tensor([5, 9, 2, 17, 30, 4, 4, 21])


def adapted(folder: Path, lora: LoraConfig = LORA, dtype: torch.dtype = torch.float32, seed: int = 0) -> CausalLM:
    """With a B that has an effect."""
    model = load(folder, dtype)
    adapter.add(model, lora, seed)
    generator = torch.Generator().manual_seed(seed)
    with model.stamp.writing(), torch.no_grad():
        for name, tensor in model.trained().items():
            if adapter.B in name:
                tensor.normal_(0.0, 0.1, generator=generator)
    return model


def logits(model: CausalLM, ids: Tensor = IDS) -> Tensor:
    return model.logits(model.hidden(ids, torch.arange(len(ids)), packed_attention([Tree(len(ids))])))


def by_peft(folder: Path, adapter_folder: Path) -> Tensor:
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), adapter_folder)
    with torch.no_grad():
        return model(IDS[None]).logits[0]


@pytest.mark.parametrize(
    ("family", "targets"), [("llama", ("all-linear",)), ("qwen2", ("q_proj", "v_proj")), ("qwen3", ("o_proj", "down_proj"))]
)
def test_peft_reads_its_folder_and_computes_the_same(tmp_path: Path, family: str, targets: tuple[str, ...]) -> None:
    folder = tiny_folder(tmp_path, family=family)
    model = adapted(folder, LoraConfig.model_validate({"rank": 3, "alpha": 7, "targets": targets}))
    plain = load(folder)
    with torch.no_grad():
        assert (logits(model) - logits(plain)).abs().max() > 0.1
    save(model, tmp_path / "adapter", folder)
    with torch.no_grad():
        torch.testing.assert_close(logits(model), by_peft(folder, tmp_path / "adapter"), rtol=0, atol=1e-5)
    with_base = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter", dtype=torch.float32)  # finds the base by itself
    with torch.no_grad():
        torch.testing.assert_close(with_base(IDS[None]).logits[0], logits(model), rtol=0, atol=1e-5)


def test_it_begins_without_an_effect_and_the_same_everywhere(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    models = [load(folder) for _ in range(3)]
    state = torch.get_rng_state()
    for model, seed in zip(models, (1, 1, 2), strict=True):
        adapter.add(model, LORA, seed)
    assert torch.equal(torch.get_rng_state(), state)  # sampling goes on as if nothing had been drawn
    first, same, other = (model.trained() for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert all(torch.equal(first[name], other[name]) == (adapter.B in name) for name in first)
    with torch.no_grad():
        torch.testing.assert_close(logits(models[0]), logits(load(folder)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapter_is_trained_and_it_is_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = tiny_folder(tmp_path)
    model, plain = adapted(folder, dtype=dtype), load(folder, dtype)
    assert infos(tensors(model)) == adapter.infos(plain, LORA)
    assert {info.dtype for info in infos(tensors(model))} == {"torch.float32"}
    assert sum(tensor.numel() for tensor in tensors(model).values()) == adapter_numbers(model.architecture, LORA)
    logits(model).sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (".lora_" in name) == parameter.requires_grad
    under = adapter.base(model)
    assert under.keys() == tensors(plain).keys()
    assert all(torch.equal(under[name], tensor) for name, tensor in tensors(plain).items())


@pytest.mark.parametrize("targets", [("v_proj",), ("down_proj",)])
def test_gradients_through_frozen_blocks_are_those_of_peft(tmp_path: Path, targets: tuple[str, ...]) -> None:
    """The fused blocks of a layer without an adapter pass gradients on, and make none for frozen weights."""
    folder = tiny_folder(tmp_path, family="qwen3")
    model = adapted(folder, LoraConfig.model_validate({"rank": 4, "alpha": 8, "targets": targets}))
    save(model, tmp_path / "adapter", folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    other = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    weight = torch.randn(len(IDS), model.architecture.vocab_size, generator=torch.Generator().manual_seed(1))
    (logits(model) * weight).sum().backward()
    (other(IDS[None]).logits[0] * weight).sum().backward()
    expected = {name.replace(".default.", "."): each for name, each in other.named_parameters()}
    for name, parameter in model.trained().items():
        torch.testing.assert_close(parameter.grad, expected[adapter.PREFIX + name].grad, rtol=1e-4, atol=1e-4)
    assert len(model.trained()) == 2 * len(targets) * model.architecture.layers


def test_merging_is_rounded_once_and_leaves_the_base(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = adapted(folder, dtype=torch.bfloat16)
    base = adapter.base(model)
    kept = {name: tensor.clone() for name, tensor in base.items()}
    memory: dict[str, Tensor] = {}
    for _ in range(3):
        found = adapter.merge(base, tensors(model), LORA.scaling, memory)
    assert all(torch.equal(base[name], tensor) for name, tensor in kept.items())
    for name, tensor in found.items():
        a, b = (tensors(model).get(name.replace(".weight", f"{part}weight")) for part in (adapter.A, adapter.B))
        if a is None or b is None:
            assert tensor is base[name]  # shared, not copied
        else:
            torch.testing.assert_close(
                tensor, (kept[name].double() + 2.0 * b.double() @ a.double()).bfloat16(), rtol=8e-3, atol=0
            )


def test_an_adapter_is_read_again(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = adapted(folder)
    save(model, tmp_path / "one", folder)
    again = load(base_of(tmp_path / "one"))
    adapter.add(again, LORA, seed=5)
    adapter.read(again, tmp_path / "one")
    assert all(torch.equal(tensor, tensors(model)[name]) for name, tensor in tensors(again).items())
    save(again, tmp_path / "two", tmp_path / "one")  # the base is still the model's folder
    assert base_of(tmp_path / "two") == folder.resolve()
    assert Architecture.from_folder(tmp_path / "two") == model.architecture


@pytest.mark.parametrize(
    "other", [LoraConfig(rank=8, alpha=8), LoraConfig(rank=4, alpha=4), LoraConfig(rank=4, alpha=8, targets=("q_proj",))]
)
def test_an_adapter_of_another_shape_is_refused(tmp_path: Path, other: LoraConfig) -> None:
    folder = tiny_folder(tmp_path)
    save(adapted(folder), tmp_path / "one", folder)
    model = load(folder)
    adapter.add(model, other, 0)
    with pytest.raises(ConfigError, match="has another rank, alpha or other targets"):
        adapter.read(model, tmp_path / "one")
