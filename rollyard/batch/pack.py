"""Micro-batches under a token budget (PURE)."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.errors import ConfigError
from rollyard.types import Sample


def check_budget(longest: int, budget: int) -> None:
    """Raises ConfigError when a sample of `longest` tokens, prompt and completion, has no room in a micro-batch of `budget`."""
    if longest > budget:
        problem = f"a sample has {longest} tokens, more than a micro-batch may hold"
        raise ConfigError(problem, where="batch.token_budget", remedy=f"use at least {longest}")


def pack(samples: Sequence[Sample], budget: int) -> tuple[tuple[Sample, ...], ...]:
    """Micro-batches of at most `budget` tokens (prompt and completion), few of them, each sample exactly once.

    First-fit decreasing, at most 22 % more bins than the best possible; source: Johnson 1973, Near-optimal bin packing
    algorithms. Samples keep their order inside a micro-batch, so the same samples give the same batches.

    Raises:
        ConfigError: one sample alone is longer than the budget.
    """
    check_budget(max((len(sample.token_ids) for sample in samples), default=0), budget)
    order = sorted(range(len(samples)), key=lambda index: (-len(samples[index].token_ids), index))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        tokens = len(samples[index].token_ids)
        place = next((bin_ for bin_, left in enumerate(room) if left >= tokens), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(budget)
        bins[place].append(index)
        room[place] -= tokens
    return tuple(tuple(samples[index] for index in sorted(members)) for members in bins)
