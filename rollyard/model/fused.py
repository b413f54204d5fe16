"""The blocks of a layer with backward passes of their own: few passes over memory, and little kept between the two.

What is cheap to make again is not kept: the normalised input, the gate's activation and its product. Matrix products run
in autocast's number format where it is on; norms and sums of gradients stay in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FIRST_WEIGHT = 3  # among the arguments of a block: x, the norm and its epsilon come before
Rotation = tuple[Tensor, Tensor]  # cosines and signed sines of each token, `[tokens, 1, head_dim]`


def norm_linears(x: Tensor, norm: nn.RMSNorm, linears: Sequence[nn.Linear]) -> tuple[Tensor, ...]:
    """Each linear of the normalised x. `[tokens, hidden]` -> one `[tokens, out]` for each."""
    if not plain(linears):
        normed = norm(x)
        return tuple(linear(normed) for linear in linears)
    weights, biases = [linear.weight for linear in linears], [linear.bias for linear in linears]
    out: tuple[Tensor, ...] = _NormLinears.apply(x, norm.weight, norm.eps, *weights, *biases)  # type: ignore[no-untyped-call]
    return out


def norm_gated(x: Tensor, norm: nn.RMSNorm, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Tensor:
    """x + down(silu(gate(n)) * up(n)), n the normalised x. `[tokens, hidden]` -> the same."""
    if not plain((gate, up, down)):
        normed = norm(x)
        summed: Tensor = x + down(F.silu(gate(normed)) * up(normed))
        return summed
    weights, biases = (gate.weight, up.weight, down.weight), (gate.bias, up.bias, down.bias)
    out: Tensor = _NormGated.apply(x, norm.weight, norm.eps, *weights, *biases)  # type: ignore[no-untyped-call]
    return out


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotary positions: x `[tokens, heads, head_dim]` -> the same.

    Pairs are (i, i + head_dim / 2), as in Hugging Face's weights.
    """
    out: Tensor = _Rotate.apply(x, *rotation)  # type: ignore[no-untyped-call]
    return out


def plain(linears: Sequence[nn.Module]) -> bool:
    """Are they linears and nothing else? One with an adapter around it has a forward pass of its own."""
    return all(isinstance(linear, nn.Linear) for linear in linears)


class _NormLinears(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        ctx.dtype = product_dtype(x)
        scale = _rms_scale(x, eps)
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(x, scale, norm, *weights)
        return _linears(_unit(x, scale).mul_(norm), weights, biases, ctx.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, norm, *weights = ctx.saved_tensors
        unit = _unit(x, scale)
        wanted = ctx.needs_input_grad[FIRST_WEIGHT : FIRST_WEIGHT + len(weights)]
        d_normed, d_weights, d_biases = _linears_backward(gradients, unit * norm, weights, wanted, ctx.biased, ctx.dtype)
        d_x, d_norm = _norm_backward(d_normed, unit, scale, norm)
        return d_x, d_norm, None, *d_weights, *d_biases


class _NormGated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Tensor, eps: float, *parameters: Tensor | None) -> Tensor:
        ctx.dtype = product_dtype(x)
        weights, biases = parameters[:3], parameters[3:]
        scale = _rms_scale(x, eps)
        gate, up = _linears(_unit(x, scale).mul_(norm), weights[:2], biases[:2], ctx.dtype)
        ctx.biased = [bias is not None for bias in biases]
        ctx.save_for_backward(x, scale, norm, gate, up, *weights)
        (out,) = _linears(F.silu(gate).mul_(up), weights[2:], biases[2:], ctx.dtype)
        return out.add_(x) if out.dtype == x.dtype else out + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, norm, gate, up, *weights = ctx.saved_tensors
        active, wanted = F.silu(gate), ctx.needs_input_grad[FIRST_WEIGHT:]
        d_product, d_down, d_down_bias = _linears_backward(
            [gradient], active * up, weights[2:], wanted[2:3], ctx.biased[2:], ctx.dtype
        )
        d_up = active.mul_(d_product)
        d_gate = torch.ops.aten.silu_backward(d_product.mul_(up), gate)
        unit = _unit(x, scale)
        d_normed, d_weights, d_biases = _linears_backward(
            [d_gate, d_up], unit * norm, weights[:2], wanted[:2], ctx.biased[:2], ctx.dtype
        )
        d_x, d_norm = _norm_backward(d_normed, unit, scale, norm)
        return d_x.add_(gradient), d_norm, None, *d_weights, *d_down, *d_biases, *d_down_bias


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """The rotation back."""
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, -sin), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


# ---------------------------------------------------------------------------------------------------- the parts


def product_dtype(x: Tensor) -> torch.dtype:
    """Number format of matrix products."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _linears(
    x: Tensor, weights: Sequence[Tensor | None], biases: Sequence[Tensor | None], dtype: torch.dtype
) -> tuple[Tensor, ...]:
    x, out = x.to(dtype), []
    for weight, bias in zip(weights, biases, strict=True):
        assert weight is not None
        out.append(F.linear(x, weight.to(dtype), None if bias is None else bias.to(dtype)))
    return tuple(out)


def _linears_backward(
    gradients: Sequence[Tensor],
    x: Tensor,
    weights: Sequence[Tensor],
    wanted: Sequence[bool],
    biased: Sequence[bool],
    dtype: torch.dtype,
) -> tuple[Tensor, list[Tensor | None], list[Tensor | None]]:
    """Gradients of the common input x, of the weights that are not frozen, and of the biases."""
    d_x: Tensor | None = None
    d_weights: list[Tensor | None] = []
    d_biases: list[Tensor | None] = []
    product = x.to(dtype)
    for gradient, weight, want, has_bias in zip(gradients, weights, wanted, biased, strict=True):
        cast = gradient.to(dtype)
        d_x = cast @ weight.to(dtype) if d_x is None else d_x.addmm_(cast, weight.to(dtype))
        d_weights.append((cast.t() @ product).to(weight.dtype) if want else None)
        d_biases.append(gradient.sum(0, dtype=torch.float32).to(weight.dtype) if has_bias else None)
    assert d_x is not None
    return d_x, d_weights, d_biases


def _rms_scale(x: Tensor, eps: float) -> Tensor:
    """1 / root mean square of each row, `[tokens, 1]` float32."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _unit(x: Tensor, scale: Tensor) -> Tensor:
    """x with a root mean square of 1, in its own format."""
    return (x * scale).to(x.dtype)


def _norm_backward(gradient: Tensor, unit: Tensor, scale: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of a norm's input and weight: with g = gradient * weight, d x = scale (g - unit mean(g unit))."""
    gradient, unit = gradient.to(scale.dtype), unit.to(scale.dtype)
    product = gradient * unit
    mean = (product @ norm.to(scale.dtype)).div_(unit.shape[-1]).unsqueeze(1)
    d_x = (gradient * norm).addcmul_(unit, mean, value=-1).mul_(scale)
    return d_x.to(norm.dtype), product.sum(0).to(norm.dtype)
