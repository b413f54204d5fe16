"""Rows: masks from lengths, members without a verdict left out."""

from __future__ import annotations

import pytest

from rollyard.batch.sample import build
from rollyard.errors import ConfigError
from rollyard.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    Sampling,
    VersionSpan,
    WeightVersion,
)

V0 = WeightVersion(0)


def group(*completions: tuple[int, ...], prompt: tuple[int, ...] = (3, 4), id_: int = 0) -> Group:
    rollouts = []
    for member, ids in enumerate(completions):
        logprobs = tuple(-0.5 - i for i in range(len(ids)))
        done = Completion(id_, member, ids, logprobs, (VersionSpan(V0, V0, len(ids)),), FinishReason.STOP, "")
        rollouts.append(Rollout(done, Reward(1.0)))
    return Group(Prompt(id_, id_, prompt, "p"), tuple(rollouts))


def test_a_row_by_hand():
    """Pad and end-of-sequence share id 0 here: the mask knows nothing of ids."""
    batch = build(4, [group((5, 7, 0), (5,))], [(1.5, -2.0)], 100, Sampling(8))
    first, second = sorted(batch.samples, key=lambda sample: sample.member)
    assert batch.step == 4
    assert first.token_ids == (3, 4, 5, 7, 0) and first.mask == (False, False, True, True, True)
    assert first.logprobs == (0.0, 0.0, -0.5, -1.5, -2.5) and first.advantages == (0.0, 0.0, 1.5, 1.5, 1.5)
    assert second.token_ids == (3, 4, 5) and second.mask == (False, False, True)
    assert second.spans == (VersionSpan(V0, V0, 1),)


def test_members_without_a_verdict_are_left_out():
    batch = build(0, [group((5,), (6,), (7,))], [(1.0, None, -1.0)], 100, Sampling(8))
    assert {sample.member for sample in batch.samples} == {0, 2}
    assert build(0, [group((5,))], [(None,)], 100, Sampling(8)).micro_batches == ()


def test_too_long_for_any_micro_batch():
    with pytest.raises(ConfigError, match=r"batch.token_budget: a sample has 5 tokens.*at least 5"):
        build(0, [group((5, 7, 0))], [(1.0,)], 4, Sampling(8))
