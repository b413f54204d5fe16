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
    """Micro-batches of at most `budget` tokens, few of them, each sample exactly once.

    What counts is what the trainer computes: a prompt once in each micro-batch, however many samples begin with it. So
    samples with the same prompt stay together where the budget allows, and are else spread over as few micro-batches as
    can be. Both by first-fit decreasing, at most 22 % more bins than the best possible for what it is given; source:
    Johnson 1973, Near-optimal bin packing algorithms. Samples keep their order inside a micro-batch, so the same samples
    give the same batches.

    Raises:
        ConfigError: one sample alone is longer than the budget.
    """
    found: list[list[int]] = []  # samples that stay together
    sizes: list[int] = []
    for prompt, members in families(samples, budget):
        found += members
        sizes += [prompt + sum(len(samples[index].token_ids) - prompt for index in unit) for unit in members]
    bins = [[index for unit in bin_ for index in found[unit]] for bin_ in first_fit(sizes, budget)]
    return tuple(tuple(samples[index] for index in sorted(members)) for members in bins)


def families(samples: Sequence[Sample], budget: int) -> list[tuple[int, list[list[int]]]]:
    """Of each different prompt its tokens, and the places of its samples, cut into as few parts as fit into `budget` each.

    Raises ConfigError when one sample alone is longer than the budget.
    """
    check_budget(max((len(sample.token_ids) for sample in samples), default=0), budget)
    prompts: dict[tuple[int, ...], list[int]] = {}
    for index, sample in enumerate(samples):
        prompts.setdefault(_prompt(sample), []).append(index)
    return [
        (len(prompt), [[members[place] for place in bin_] for bin_ in first_fit(own, budget - len(prompt))])
        for prompt, members in prompts.items()
        for own in [[len(samples[index].token_ids) - len(prompt) for index in members]]
    ]


def first_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Places of `sizes` in bins of `room`: the largest first, each into the first bin that holds it."""
    bins: list[list[int]] = []
    left: list[int] = []
    for place in sorted(range(len(sizes)), key=lambda place: (-sizes[place], place)):
        bin_ = next((number for number, free in enumerate(left) if free >= sizes[place]), len(bins))
        if bin_ == len(bins):
            bins.append([])
            left.append(room)
        bins[bin_].append(place)
        left[bin_] -= sizes[place]
    return bins


def _prompt(sample: Sample) -> tuple[int, ...]:
    """The tokens before the first one that is trained on: all of them, where none is."""
    trained = sample.mask.index(True) if True in sample.mask else len(sample.mask)
    return sample.token_ids[:trained]
