"""Micro-batches under a token budget (PURE)."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.types import Sample


def pack(samples: Sequence[Sample], budget: int) -> tuple[tuple[Sample, ...], ...]:
    """Micro-batches of at most `budget` tokens (prompt and completion), few of them, each sample exactly once.

    First-fit decreasing, at most 22 % more bins than the best possible; source: Johnson 1973, Near-optimal bin packing
    algorithms. Samples keep their order inside a micro-batch, so the same samples give the same batches.

    Raises ValueError when one sample alone is longer than the budget.
    """
    order = sorted(range(len(samples)), key=lambda index: (-len(samples[index].token_ids), index))
    bins: list[list[int]] = []
    room: list[int] = []
    for index in order:
        tokens = len(samples[index].token_ids)
        if tokens > budget:
            raise ValueError(f"a sample of {tokens} tokens does not fit a micro-batch of {budget}")
        place = next((bin_ for bin_, left in enumerate(room) if left >= tokens), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(budget)
        bins[place].append(index)
        room[place] -= tokens
    return tuple(tuple(samples[index] for index in sorted(members)) for members in bins)
