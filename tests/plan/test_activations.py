"""What our own trainer keeps for its backward pass, beside what the planner says it does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollyard.model.architecture import Architecture
from rollyard.model.attention import PaddedAttention, Tree
from rollyard.model.transformer import CausalLM
from rollyard.plan.costs import costs_of
from tests.plan.scenarios import scenario

TREES = (Tree(20, (60, 70)), Tree(20, (80, 50)))  # 300 tokens
LAYERS, HIDDEN = 6, 256
ARCHITECTURE = Architecture("llama", 512, HIDDEN, LAYERS, 4, 2, 64, 896, 128)


def kept(dtype: torch.dtype, products: torch.dtype, *, recompute: bool = False) -> float:
    """Bytes of a token, as on a GPU, where attention has no code of its own. Parameters are kept anyway."""
    model = CausalLM(ARCHITECTURE, dtype)
    model.initialise(0)
    model.recompute(layers=recompute)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens, device = sum(tree.tokens for tree in TREES), torch.device("cpu")
    ids, positions = torch.arange(tokens), torch.arange(tokens) % 100
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", products, enabled=products != dtype),
    ):
        model.hidden(ids, positions, PaddedAttention(TREES, device))
        return sum(each.untyped_storage().nbytes() for place, each in seen.items() if place not in own) / tokens


@pytest.mark.parametrize(
    ("dtype", "precision", "products"),
    [
        ("float32", "model", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
        ("bfloat16", "model", torch.bfloat16),
    ],
)
def test_activations_are_kept_as_the_planner_says(dtype: str, precision: str, products: torch.dtype) -> None:
    """None are computed again. The planner's number is that of a common layer, whatever its inner width."""
    options = {"model__path": "llama-1b", "place__placement": "separate", "model__dtype": dtype, "train__precision": precision}
    found = costs_of(scenario(**options, cluster__hardware="H100", cluster__memory=1e12, costs__recompute=False))
    again = costs_of(scenario(**options, cluster__hardware="H100", cluster__memory=1e12, train__recompute=True))
    layers, item = found.shape.layers, 2 if dtype == "bfloat16" else 4
    inputs = again.training.budget * found.shape.hidden * layers * item
    assert again.memory[1].activations == pytest.approx(found.memory[1].activations / layers + inputs)
    each = found.memory[1].activations / found.training.budget / found.shape.layers / found.shape.hidden
    assert 0.75 * each < kept(getattr(torch, dtype), products) / LAYERS / HIDDEN < 1.05 * each
