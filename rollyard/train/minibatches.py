"""The optimizer steps of one batch: each on whole groups, the same ones on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from rollyard.train.ranks import Ranks
from rollyard.train.rows import families, tree_of
from rollyard.types import Sample

Part = tuple[Sample, ...]


def cut(micro_batches: Sequence[Part], count: int, ranks: Ranks) -> list[list[Part]]:
    """Micro-batches of each step, none larger than the largest was; of a rank without a sample in a step, none.

    Groups go by their ids, in `count` runs of equal length but for one; of fewer groups come fewer steps. Which group belongs
    where depends on nothing but the groups of the whole batch, wherever their rows are.
    """
    if count == 1:
        return [list(micro_batches)]
    every = _groups({sample.group for part in micro_batches for sample in part}, ranks)
    step = {group: place * count // len(every) for place, group in enumerate(every)}
    limit = max((_tokens(part) for part in micro_batches), default=0)
    found = []
    for number in sorted(set(step.values())):
        own = (tuple(sample for sample in part if step[sample.group] == number) for part in micro_batches)
        found.append(_joined((part for part in own if part), limit))
    return found


def _groups(own: Iterable[int], ranks: Ranks) -> list[int]:
    """Of all ranks, in order."""
    here = torch.tensor(sorted(own), dtype=torch.int64)
    counts = ranks.gather(torch.tensor([len(here)])).flatten().tolist()
    padded = torch.zeros(max(counts), dtype=torch.int64)
    padded[: len(here)] = here
    rows = ranks.gather(padded).tolist()
    return sorted({group for row, count in zip(rows, counts, strict=True) for group in row[:count]})


def _joined(parts: Iterable[Part], limit: int) -> list[Part]:
    """Neighbours together, as long as they hold no more tokens than `limit`: what is left of micro-batches is small."""
    found: list[Part] = []
    for part in parts:
        if found and _tokens(found[-1] + part) <= limit:
            found[-1] += part
        else:
            found.append(part)
    return found


def _tokens(part: Part) -> int:
    """That are computed, a shared prompt once."""
    return sum(tree_of(members).tokens for members in families(part))
