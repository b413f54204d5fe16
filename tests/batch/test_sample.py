"""Rows and micro-batches: masks from lengths, every sample once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.batch.pack import pack
from rollyard.batch.sample import build
from rollyard.errors import ConfigError
from rollyard.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    Sample,
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


def sample(member: int, tokens: int) -> Sample:
    return Sample(0, member, (1,) * tokens, (True,) * tokens, (0.0,) * tokens, (0.0,) * tokens, ())


@given(st.lists(st.integers(1, 30), max_size=60), st.integers(30, 100))
def test_every_sample_once_and_no_budget_exceeded(lengths, budget):
    samples = [sample(member, tokens) for member, tokens in enumerate(lengths)]
    micro_batches = pack(samples, budget)
    assert sorted(s.member for micro in micro_batches for s in micro) == list(range(len(lengths)))
    loads = [sum(len(s.token_ids) for s in micro) for micro in micro_batches]
    assert all(0 < load <= budget for load in loads)
    assert sum(sorted(loads)[:2]) > budget or len(loads) < 2  # else first fit would have joined them
    assert pack(samples, budget) == micro_batches


def test_decreasing_first_fit_by_hand():
    """6, 5, 4, 3, 2 into 10: 6 + 4, 5 + 3 + 2."""
    found = pack([sample(member, tokens) for member, tokens in enumerate((2, 3, 4, 5, 6))], 10)
    assert [[len(s.token_ids) for s in micro] for micro in found] == [[4, 6], [2, 3, 5]]
