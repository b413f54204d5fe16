"""Blocks with backward passes of their own against the formulas written out, in float64 and by torch's autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rollyard.model.fused import norm_gated, norm_linears, rotate

TOKENS, WIDTH, WIDE = 11, 16, 24


def norm() -> nn.RMSNorm:
    module = nn.RMSNorm(WIDTH, 1e-3)
    nn.init.normal_(module.weight, 1.0, 0.2)
    return module


def normalised(x: Tensor, module: nn.RMSNorm) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * module.weight


def compare(ours, plain, x: Tensor, modules: list[nn.Module], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Outputs and all gradients of `ours`, against `plain` of the same parameters in float64."""
    x = x.requires_grad_()
    parameters = [parameter for module in modules for parameter in module.parameters()]
    out = ours(x)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found = torch.autograd.grad((out.float() * direction).sum(), [x, *parameters])
    assert [gradient.dtype for gradient in found] == [value.dtype for value in (x, *parameters)]
    for module in modules:
        module.double()
    exact = x.detach().double().requires_grad_()
    parameters = [parameter for module in modules for parameter in module.parameters()]
    expected = plain(exact)
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)
    gradients = torch.autograd.grad((expected * direction).sum(), [exact, *parameters])
    for gradient, reference in zip(found, gradients, strict=True):
        torch.testing.assert_close(gradient.double(), reference, rtol=rtol, atol=atol)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("bias", [True, False])
def test_linears_of_a_norm(bias: bool) -> None:
    module, linears = norm(), [nn.Linear(WIDTH, out, bias) for out in (8, 5, 7)]
    compare(
        lambda x: torch.cat(norm_linears(x, module, linears), 1),
        lambda x: torch.cat([linear(normalised(x, module)) for linear in linears], 1),
        torch.randn(TOKENS, WIDTH),
        [module, *linears],
    )


def gated(bias: bool) -> tuple[nn.RMSNorm, nn.Linear, nn.Linear, nn.Linear]:
    return norm(), nn.Linear(WIDTH, WIDE, bias), nn.Linear(WIDTH, WIDE, bias), nn.Linear(WIDE, WIDTH, bias)


def plain_gated(x: Tensor, module: nn.RMSNorm, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Tensor:
    normed = normalised(x, module)
    return x + down(F.silu(gate(normed)) * up(normed))


@pytest.mark.parametrize("bias", [True, False])
def test_gated_feed_forward_of_a_norm(bias: bool) -> None:
    modules = gated(bias)
    compare(lambda x: norm_gated(x, *modules), lambda x: plain_gated(x, *modules), torch.randn(TOKENS, WIDTH), [*modules])


def test_bfloat16_and_autocast() -> None:
    """Of a model in bfloat16, and of float32 parameters whose products are in bfloat16: all gradients in the own format."""
    modules = [module.bfloat16() for module in gated(True)]
    x = torch.randn(TOKENS, WIDTH).bfloat16()
    compare(lambda x: norm_gated(x, *modules), lambda x: plain_gated(x, *modules), x, modules, 0.05, 0.05)

    def cast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return norm_gated(x, *modules)

    modules = [*gated(True)]
    compare(cast, lambda x: plain_gated(x, *modules), torch.randn(TOKENS, WIDTH), modules, 0.05, 0.05)


def test_rotation_by_hand_and_back() -> None:
    """A quarter turn takes the pair (1, 2) to (-2, 1); the gradient turns the other way."""
    quarter = (torch.zeros(1, 1, 2), torch.tensor([[[-1.0, 1.0]]]))
    x = torch.tensor([[[1.0, 2.0]]], requires_grad=True)
    out = rotate(x, quarter)
    assert out.tolist() == [[[-2.0, 1.0]]]
    (out * torch.tensor([3.0, 5.0])).sum().backward()
    assert x.grad.tolist() == [[[5.0, -3.0]]]


def test_what_is_kept_for_the_backward_pass() -> None:
    """The input, gate and up of each token, and one number: no normalised copy, no activation, no product."""
    modules, kept = gated(False), []
    x = torch.randn(1000, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        norm_gated(x, *modules)
    parameters = sum(parameter.numel() for module in modules for parameter in module.parameters())
    assert sum(tensor.numel() for tensor in kept) == 1000 * (WIDTH + 2 * WIDE + 1) + parameters
