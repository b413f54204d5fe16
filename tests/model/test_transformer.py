from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rollyard.model.architecture import Architecture
from rollyard.model.attention import Tree, packed_attention
from rollyard.model.folder import load
from rollyard.model.transformer import CausalLM
from tests.tiny import tiny_folder

LENGTHS = [1, 7, 30, 2, 19, 7]


def sequences(vocab: int = 40) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(2, vocab, (length,), generator=generator) for length in LENGTHS]


def packed_hidden(model: CausalLM, rows: list[Tensor]) -> Tensor:
    lengths = [len(row) for row in rows]
    positions = torch.cat([torch.arange(length) for length in lengths])
    return model.hidden(torch.cat(rows), positions, packed_attention([Tree(length) for length in lengths]))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 8}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
        ),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "head_dim": 32}),
    ],
)
def test_logits_and_gradients_equal_transformers(tmp_path: Path, family: str, change: dict[str, Any], tied: bool) -> None:
    folder = tiny_folder(tmp_path, family, tied=tied, **change)
    ours, theirs = load(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = sequences()
    logits = ours.logits(packed_hidden(ours, rows))
    expected = torch.cat([theirs(row[None]).logits[0] for row in rows])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)

    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * direction).sum().backward()
    (expected * direction).sum().backward()
    reference = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert {name for name, _ in ours.named_parameters()} == set(reference)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, reference[name], rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_one_key_value_head_and_as_many_as_queries(tmp_path: Path) -> None:
    for kv_heads in (1, 4):
        folder = tiny_folder(tmp_path / str(kv_heads), "llama", kv_heads=kv_heads)
        ours, theirs = load(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        row = sequences()[2]
        torch.testing.assert_close(ours.logits(packed_hidden(ours, [row])), theirs(row[None]).logits[0], rtol=1e-4, atol=1e-4)


def test_bfloat16_stays_near_transformers(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    ours, theirs = load(folder, torch.bfloat16), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    row = sequences()[2]
    logits = ours.logits(packed_hidden(ours, [row]))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, theirs(row[None]).logits[0].float(), rtol=0.05, atol=0.05)


def test_parameters_are_as_many_as_the_architecture_says(tmp_path: Path) -> None:
    for family, tied in (("llama", True), ("qwen2", False), ("qwen3", True)):
        model = load(tiny_folder(tmp_path, family, tied=tied))
        assert sum(parameter.numel() for parameter in model.parameters()) == model.architecture.parameters


def test_initialise_belongs_to_the_seed() -> None:
    arch = Architecture("qwen2", 30, 32, 1, 4, 2, 8, 64, 32, tied=False, qkv_bias=True)
    first, same, other = CausalLM(arch), CausalLM(arch), CausalLM(arch)
    first.initialise(3)
    same.initialise(3)
    other.initialise(4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.head_weight, other.head_weight)
    assert abs(first.head_weight.std().item() - 0.02) < 0.003
    assert first.model.norm.weight.eq(1).all()
    assert first.model.layers[0].self_attn.q_proj.bias.eq(0).all()
    assert first.stamp.generation == 1
