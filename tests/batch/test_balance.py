"""Parts of a batch: every sample once, the largest part small, samples of one prompt together where that costs nothing."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollyard.batch.balance import split
from rollyard.batch.pack import pack
from rollyard.batch.sample import build, shards
from rollyard.errors import ConfigError
from rollyard.types import Sample, Sampling
from tests.batch.test_pack import computed, sample
from tests.batch.test_sample import group

GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=6)), max_size=7)
RANKS = st.integers(1, 5)


def samples_of(groups: list[tuple[int, list[int]]]) -> list[Sample]:
    """Groups of a prompt and what its members wrote, in tokens; each group has a prompt of its own."""
    return [
        sample(100 * number + member, tokens, (number + 2,) * prompt)
        for number, (prompt, lengths) in enumerate(groups)
        for member, tokens in enumerate(lengths)
    ]


def prompt_of(sample: Sample) -> tuple[int, ...]:
    return sample.token_ids[: sample.mask.index(True)]


def load(part: tuple[Sample, ...], budget: int) -> int:
    return sum(computed(micro) for micro in pack(part, budget))


@given(GROUPS, RANKS, st.integers(29, 200))
def test_every_sample_is_in_one_part_and_in_order(groups, ranks, budget):
    samples = samples_of(groups)
    parts = split(samples, ranks, budget)
    assert len(parts) == ranks
    assert sorted(s.member for part in parts for s in part) == [s.member for s in samples]
    assert all(list(part) == [s for s in samples if s in part] for part in parts)
    assert split(samples, ranks, budget) == parts
    assert all(0 < computed(micro) <= budget for part in parts for micro in pack(part, budget))


@given(GROUPS, RANKS)
def test_no_part_is_much_larger_than_it_has_to_be(groups, ranks):
    """As long as the largest part exceeds the smallest by more than a sample, that sample moves: so it is above the mean by
    less than the longest sample. The mean is at most what it would be with every prompt on as many ranks as can be."""
    samples = samples_of(groups)
    loads = [load(part, 10**6) for part in split(samples, ranks, 10**6)]
    longest = max((len(s.token_ids) for s in samples), default=0)
    spread = sum(prompt * min(ranks, len(lengths)) + sum(lengths) for prompt, lengths in groups)
    assert ranks * max(loads) <= spread + (ranks - 1) * longest


@settings(max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=7), st.integers(2, 3))
def test_samples_that_share_nothing_come_within_a_third_of_the_best(lengths, ranks):
    """Graham's bound for the largest first: 4/3 - 1/3n of the best. Every way to split them is tried."""
    samples = [sample(member, tokens) for member, tokens in enumerate(lengths)]
    sizes = [len(s.token_ids) for s in samples]
    best = min(
        max(sum(size for size, rank in zip(sizes, way, strict=True) if rank == each) for each in range(ranks))
        for way in product(range(ranks), repeat=len(sizes))
    )
    loads = [sum(len(s.token_ids) for s in part) for part in split(samples, ranks, 100)]
    assert max(loads) <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 20), min_size=1, max_size=3)), min_size=1, max_size=3))
def test_samples_of_shared_prompts_come_within_a_third_of_the_best(groups):
    """Between two ranks, every way to split them is tried."""
    samples = samples_of(groups)
    best = min(
        max(load(tuple(s for s, rank in zip(samples, way, strict=True) if rank == each), 10**6) for each in range(2))
        for way in product(range(2), repeat=len(samples))
    )
    assert max(load(part, 10**6) for part in split(samples, 2, 10**6)) <= best * 4 / 3


@given(GROUPS, RANKS)
def test_samples_of_one_prompt_are_apart_only_where_that_makes_the_largest_part_smaller(groups, ranks):
    """Bringing all of a prompt that one rank has to another that has it too would make that the largest of all."""
    parts = split(samples_of(groups), ranks, 10**6)
    loads = [load(part, 10**6) for part in parts]
    for prompt in {prompt_of(s) for part in parts for s in part}:
        own = {rank: sum(sum(s.mask) for s in part if prompt_of(s) == prompt) for rank, part in enumerate(parts)}
        holders = [rank for rank, tokens in own.items() if tokens]
        for source, target in product(holders, holders):
            assert source == target or loads[target] + own[source] > max(loads)


def test_groups_that_divide_evenly_stay_whole():
    samples = samples_of([(5, [7, 3, 4])] * 6)
    for part in split(samples, 3, 100):
        assert len({prompt_of(s) for s in part}) == 2 and len(part) == 6


def test_a_group_is_split_where_that_is_faster_by_hand():
    """A prompt of 2 with 9, 9 and 1 is 21; beside a group of 3 + 4 it gives one of its long ones away: 12 and 18."""
    samples = samples_of([(2, [9, 9, 1]), (3, [4])])
    assert [[s.member for s in part] for part in split(samples, 2, 100)] == [[1, 2], [0, 100]]


def test_a_prompt_that_fills_several_micro_batches_counts_in_each():
    """20 + 4 x 20 in micro-batches of 60: twice 60, one for each rank, and nothing to gain by another split."""
    samples = samples_of([(20, [20, 20, 20, 20])])
    parts = split(samples, 2, 60)
    assert [load(part, 60) for part in parts] == [60, 60] and [len(part) for part in parts] == [2, 2]


def test_fewer_samples_than_ranks_leave_some_without_any():
    samples = samples_of([(3, [2, 2])])
    assert [len(part) for part in split(samples, 4, 100)] == [1, 1, 0, 0]
    assert split([], 3, 100) == ((), (), ())


def test_a_sample_longer_than_the_budget_is_refused():
    with pytest.raises(ConfigError, match="at least 8"):
        split([sample(0, 7), sample(1, 2)], 2, 7)


def test_shards_are_the_batch_in_parts():
    groups = [group((5, 6), (7,), id_=0), group((8, 9, 5), (6,), prompt=(4,), id_=1)]
    values = [(1.0, None), (-1.0, 0.5)]
    whole = build(3, groups, values, 100, Sampling(8))
    assert shards(3, groups, values, 100, Sampling(8), 1) == (whole,)
    parts = shards(3, groups, values, 100, Sampling(8), 5)
    assert [part.step for part in parts] == [3] * 5 and {part.sampling for part in parts} == {Sampling(8)}
    named = [(s.group, s.member) for part in parts for s in part.samples]
    assert sorted(named) == sorted((s.group, s.member) for s in whole.samples) == [(0, 0), (1, 0), (1, 1)]
