"""Training rows from judged groups. Masks come from lengths, never from the value of a token."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.batch.pack import pack
from rollyard.types import Group, Rollout, Sample, Sampling, TrainBatch


def build(
    step: int, groups: Sequence[Group], advantages: Sequence[Sequence[float | None]], budget: int, sampling: Sampling
) -> TrainBatch:
    """The batch of one optimizer step. Members without a verdict are left out.

    Args:
        step: the version it trains.
        groups: judged groups.
        advantages: one number for each rollout of each group, None where there is no verdict.
        budget: tokens of a micro-batch at most.
        sampling: how the tokens were drawn.

    Raises:
        ConfigError: a sample alone is longer than the budget.
    """
    samples = [
        row(group, rollout, advantage)
        for group, values in zip(groups, advantages, strict=True)
        for rollout, advantage in zip(group.rollouts, values, strict=True)
        if advantage is not None
    ]
    return TrainBatch(step, pack(samples, budget), sampling)


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
