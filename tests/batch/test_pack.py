"""Micro-batches: every sample once, within the budget, a shared prompt counted once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.batch.pack import check_budget, pack
from rollyard.errors import ConfigError
from rollyard.types import Sample


def sample(member: int, tokens: int, prompt: tuple[int, ...] | None = None) -> Sample:
    """`tokens` sampled ones after a prompt, by default one of its own."""
    prompt = (100 + member,) if prompt is None else prompt
    ids = prompt + (1,) * tokens
    mask = (False,) * len(prompt) + (True,) * tokens
    return Sample(0, member, ids, mask, (0.0,) * len(ids), (0.0,) * len(ids), ())


def computed(micro: tuple[Sample, ...]) -> int:
    """Tokens, each different prompt once."""
    prompts = {s.token_ids[: s.mask.index(True)] for s in micro}
    return sum(map(len, prompts)) + sum(sum(s.mask) for s in micro)


@given(st.lists(st.integers(1, 29), max_size=60), st.integers(30, 100))
def test_every_sample_once_and_no_budget_exceeded(lengths, budget):
    samples = [sample(member, tokens) for member, tokens in enumerate(lengths)]
    micro_batches = pack(samples, budget)
    assert sorted(s.member for micro in micro_batches for s in micro) == list(range(len(lengths)))
    loads = [computed(micro) for micro in micro_batches]
    assert all(0 < load <= budget for load in loads)
    assert sum(sorted(loads)[:2]) > budget or len(loads) < 2  # else first fit would have joined them
    assert pack(samples, budget) == micro_batches


@given(
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 20), min_size=1, max_size=9)), max_size=8),
    st.integers(24, 80),
)
def test_groups_stay_together_where_the_budget_allows(groups, budget):
    """Prompts may be equal in several groups, and a completion may be empty."""
    samples = [
        sample(100 * group + member, tokens, (7,) * prompt)
        for group, (prompt, lengths) in enumerate(groups)
        for member, tokens in enumerate(lengths)
    ]
    samples = [s for s in samples if any(s.mask)]
    micro_batches = pack(samples, budget)
    assert sorted(s.member for micro in micro_batches for s in micro) == sorted(s.member for s in samples)
    assert all(0 < computed(micro) <= budget for micro in micro_batches)
    for prompt in {s.token_ids[: s.mask.index(True)] for s in samples}:
        family = tuple(s for s in samples if s.token_ids[: s.mask.index(True)] == prompt)
        holders = [micro for micro in micro_batches if set(family) & set(micro)]
        assert (len(holders) == 1) == (computed(family) <= budget)


def test_decreasing_first_fit_by_hand():
    """With their prompts of one token 6, 5, 4, 3, 2 into 10: 6 + 4, 5 + 3 + 2."""
    found = pack([sample(member, tokens) for member, tokens in enumerate((1, 2, 3, 4, 5))], 10)
    assert [[len(s.token_ids) for s in micro] for micro in found] == [[4, 6], [2, 3, 5]]


def test_a_shared_prompt_is_counted_once_by_hand():
    """A prompt of 5 with completions of 3, 2 and 4 takes 14, and cut to 12 it is counted again: 5 + 4 + 3 and 5 + 2."""
    group = [sample(member, tokens, (3,) * 5) for member, tokens in enumerate((3, 2, 4))]
    alone = sample(3, 4)
    assert pack([*group, alone], 14) == (tuple(group), (alone,))
    assert pack([*group, alone], 12) == ((group[0], group[2]), (group[1], alone))


def test_no_sample_may_be_longer_than_the_budget():
    check_budget(7, 7)
    with pytest.raises(ConfigError, match=r"batch.token_budget: a sample has 8 tokens.*at least 8"):
        check_budget(8, 7)
    with pytest.raises(ConfigError, match="a sample has 8 tokens"):
        pack([sample(0, 2), sample(1, 7)], 7)
    assert pack([], 7) == ()


def test_a_sample_without_a_trained_token_has_its_place_too():
    untrained = Sample(0, 0, (5, 6), (False, False), (0.0, 0.0), (0.0, 0.0), ())
    assert pack([untrained], 2) == ((untrained,),)
