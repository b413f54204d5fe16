"""Activations that are computed again: the same parameters, bit for bit, and less that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rollyard.model.attention import Tree, packed_attention
from rollyard.model.transformer import CausalLM
from tests.plan.test_activations import ARCHITECTURE, TREES, kept
from tests.small import config, learnt

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "in 16 bits": {"train.precision": "bfloat16"},
    "stored in 16 bits": {"model.dtype": "bfloat16"},
    "an adapter": {"weights.what": "lora", "lora.rank": 2},
    "values": {"advantage.kind": "gae", "train.value_body": 0.1},
    "a reference, in minibatches": {"train.kl": 0.1, "train.minibatches": 2},
    "whole rows": {"train.loss": "gspo"},
}


def learned(out: Path, **changes: object) -> dict[str, Tensor]:
    """Every tensor of the last checkpoint: weights or adapter, moments, a value head."""
    learnt(config(out, **{"run.steps": 2, "train.lr": 1e-3, "warmup.layers": 2, "prompts.held_out": 0, **changes}))
    files = sorted((out / "checkpoints").iterdir())[-1].glob("*.safetensors")
    found = {f"{file.name}/{name}": tensor for file in files for name, tensor in load_file(file).items()}
    return {name: tensor for name, tensor in found.items() if "random/" not in name}  # a process' own: nothing here draws


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_the_very_same(tmp_path: Path, kind: str) -> None:
    once = learned(tmp_path / "once", **KINDS[kind])
    twice = learned(tmp_path / "twice", **KINDS[kind], train__recompute=True)
    assert once.keys() == twice.keys() and len(once) > 10
    assert all(torch.equal(once[name], twice[name]) for name in once)


@pytest.mark.slow
def test_ranks_that_share_a_model_learn_the_very_same(tmp_path: Path) -> None:
    shared = {"place.placement": "separate", "place.train": 2, "train.shard": True}
    once = learned(tmp_path / "once", **shared)
    twice = learned(tmp_path / "twice", **shared, train__recompute=True)
    assert all(torch.equal(once[name], twice[name]) for name in once)


def passed(*, recompute: bool) -> tuple[int, dict[str, Tensor]]:
    """How often a layer is passed in a forward and backward pass, and the gradients."""
    model = CausalLM(ARCHITECTURE)
    model.initialise(0)
    model.recompute(layers=recompute)
    times = 0

    def count(*_: object) -> None:
        nonlocal times
        times += 1

    model.model.layers[0].mlp.register_forward_pre_hook(count)
    tokens = sum(tree.tokens for tree in TREES)
    hidden = model.hidden(torch.arange(tokens), torch.arange(tokens) % 100, packed_attention(TREES))
    hidden.square().mean().backward()
    return times, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def test_each_layer_is_passed_twice_and_without_a_gradient_once() -> None:
    (once, gradients), (twice, again) = passed(recompute=False), passed(recompute=True)
    assert (once, twice) == (1, 2)
    assert gradients.keys() == again.keys() and len(gradients) > 10
    assert all(torch.equal(gradients[name], again[name]) for name in gradients)
    model = CausalLM(ARCHITECTURE)
    model.initialise(0)
    model.recompute(layers=True)
    with torch.no_grad():
        assert not model.hidden(torch.arange(5), torch.arange(5), packed_attention((Tree(5),))).requires_grad


@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_the_input_of_a_layer_is_all_that_is_kept(products: torch.dtype) -> None:
    """That of the last norm and its output besides, and a few bytes of each token's id and norm."""
    layers, hidden = ARCHITECTURE.layers, ARCHITECTURE.hidden_size
    again = kept(torch.float32, products, recompute=True)
    assert 4 * hidden * (layers + 2) <= again < 4 * hidden * (layers + 2) + 16
    assert kept(torch.float32, products) > 5 * again
