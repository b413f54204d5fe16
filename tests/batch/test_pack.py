"""Micro-batches: every sample once, within the budget."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.batch.pack import check_budget, pack
from rollyard.errors import ConfigError
from rollyard.types import Sample


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


def test_no_sample_may_be_longer_than_the_budget():
    check_budget(7, 7)
    with pytest.raises(ConfigError, match=r"batch.token_budget: a sample has 8 tokens.*at least 8"):
        check_budget(8, 7)
    with pytest.raises(ConfigError, match="a sample has 8 tokens"):
        pack([sample(0, 2), sample(1, 8)], 7)
    assert pack([], 7) == ()
