"""Training rows from judged groups. Masks come from lengths, never from the value of a token."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.batch.balance import split
from rollyard.batch.pack import pack
from rollyard.types import Group, Rollout, Sample, Sampling, TrainBatch


def build(
    step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], budget: int, sampling: Sampling
) -> TrainBatch:
    """The batch of one optimizer step, for a trainer that is one. See `shards`."""
    return shards(step, groups, advantages, budget, sampling, 1)[0]


def shards(
    step: int,
    groups: Sequence[Group],
    advantages: Sequence[Sequence[float | None]],
    budget: int,
    sampling: Sampling,
    ranks: int,
) -> tuple[TrainBatch, ...]:
    """The batch of one optimizer step, a part of it for each data-parallel rank. Members without a verdict are left out.

    Args:
        step: the version it trains.
        groups: judged groups.
        advantages: one number for each rollout of each group, None where there is no verdict.
        budget: tokens of a micro-batch at most.
        sampling: how the tokens were drawn.
        ranks: how many parts, at least 1. Where samples are few, some have none.

    Raises:
        ConfigError: a sample alone is longer than the budget.
    """
    samples = [
        row(group, rollout, advantage)
        for group, values in zip(groups, advantages, strict=True)
        for rollout, advantage in zip(group.rollouts, values, strict=True)
        if advantage is not None
    ]
    return tuple(TrainBatch(step, pack(part, budget), sampling) for part in split(samples, ranks, budget))


def row(group: Group, rollout: Rollout, advantage: float) -> Sample:
    """One rollout as a training row: nothing to learn on the prompt, the advantage on every sampled token."""
    done = rollout.completion
    prompt, sampled = len(group.prompt.token_ids), len(done.token_ids)
    return Sample(
        group=group.id,
        member=done.member,
        token_ids=group.prompt.token_ids + done.token_ids,
        mask=(False,) * prompt + (True,) * sampled,
        logprobs=(0.0,) * prompt + done.logprobs,
        advantages=(0.0,) * prompt + (advantage,) * sampled,
        spans=done.spans,
    )
