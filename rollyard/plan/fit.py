"""Straight lines through what was measured (PURE)."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import median
from typing import NamedTuple


class Fit(NamedTuple):
    """`fixed + slope * x`, neither below 0. `residual` is the root mean square of what is left, as a share of the mean."""

    fixed: float
    slope: float
    residual: float


def least_squares(x: Sequence[float], y: Sequence[float], weights: Sequence[float], least: float = 0.0) -> Fit:
    """Of means of many each, with how many as weights. At least one. `least`: of the slope, unless the line is below 0 then."""
    whole = sum(weights)
    mean_x = sum(w * a for w, a in zip(weights, x, strict=True)) / whole
    mean_y = sum(w * b for w, b in zip(weights, y, strict=True)) / whole
    square = sum(w * (a - mean_x) ** 2 for w, a in zip(weights, x, strict=True))
    product = sum(w * (a - mean_x) * (b - mean_y) for w, a, b in zip(weights, x, y, strict=True))
    slope = max(product / square, least) if square else least
    fixed = mean_y - slope * mean_x
    if fixed < 0:  # then the line through 0
        fixed, slope = 0.0, sum(w * a * b for w, a, b in zip(weights, x, y, strict=True)) / (square + whole * mean_x**2)
    return Fit(fixed, slope, _left(x, y, weights, fixed, slope))


def middle(x: Sequence[float], y: Sequence[float], least: float = 0.0) -> Fit:
    """Theil and Sen: the slope is the median of those between all pairs, so that a few wild ones say nothing. At least one.

    `least`: of the slope, unless the line is below 0 then.
    """
    slopes = [
        (d - b) / (c - a) for i, (a, b) in enumerate(zip(x, y, strict=True)) for c, d in zip(x[:i], y[:i], strict=True) if c != a
    ]
    steepest = median(y) / median(x) if median(x) else 0.0
    slope = min(max(median(slopes), least), steepest) if slopes else steepest
    fixed = max(median(b - slope * a for a, b in zip(x, y, strict=True)), 0.0)
    return Fit(fixed, slope, _left(x, y, [1.0] * len(x), fixed, slope))


def _left(x: Sequence[float], y: Sequence[float], weights: Sequence[float], fixed: float, slope: float) -> float:
    whole, mean = sum(weights), sum(w * b for w, b in zip(weights, y, strict=True))
    squares = sum(w * (b - fixed - slope * a) ** 2 for w, a, b in zip(weights, x, y, strict=True))
    return sqrt(squares / whole) / (mean / whole) if mean else 0.0
