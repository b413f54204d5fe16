"""Causal attention over packed sequences, for training: differentiable, with little padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

# A bucket's shortest sequence has at least this share of its longest one's tokens.
LEAST_FULL = 0.75


class Move(torch.autograd.Function):
    """Rows of a flat tensor into padded buckets, or back. Each is the other's gradient, and both are plain gathers.

    `index` picks the rows going forward, `back` the rows of the gradient. Padding repeats some row: no attention from
    a real token reaches it, so its own gradient is 0 and is never looked at.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return gradient.index_select(0, back), None, None
