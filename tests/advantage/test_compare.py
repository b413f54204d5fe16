"""Comparisons over a batch: by hand, against NumPy, and what holds whatever the rewards."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollyard.advantage.compare import KINDS, compare
from rollyard.batch.sample import shards
from rollyard.config import AdvantageConfig
from rollyard.errors import TrainError
from rollyard.types import LARGEST, FinishReason, Group, Rollout, Sampling
from tests.advantage.test_group import TINY, group

GROUPWISE = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")
COMPARED = (*GROUPWISE, "reinforce++")


def batch(*groups: tuple[float | None, ...]) -> list[Group]:
    return [group(*rewards, id_=id_) for id_, rewards in enumerate(groups)]


def cut(one: Group, *members: int, finish: FinishReason = FinishReason.LENGTH) -> Group:
    """The group with these members truncated."""
    rollouts = tuple(
        replace(each, completion=replace(each.completion, finish=finish)) if each.completion.member in members else each
        for each in one.rollouts
    )
    return replace(one, rollouts=rollouts)


def test_reinforce_by_hand():
    """1, 0 and 0, 0, 4: mean 1, squares 0 + 1 + 1 + 1 + 9 = 12, sample std sqrt(3), population std sqrt(12 / 5)."""
    groups = batch((1.0, 0.0), (0.0, 0.0, 4.0))
    root = math.sqrt(3.0)
    found = compare(groups, AdvantageConfig(kind="reinforce++", eps=TINY))
    assert found == [pytest.approx((0.0, -1 / root)), pytest.approx((-1 / root, -1 / root, 3 / root))]
    population = compare(groups, AdvantageConfig(kind="reinforce++", std="population", eps=TINY))
    assert population[1][2] == pytest.approx(3 / math.sqrt(2.4))
    assert compare(groups, AdvantageConfig(kind="reinforce++", std="none")) == [(0.0, -1.0), (-1.0, -1.0, 3.0)]


def test_reinforce_with_baseline_by_hand():
    """1, 0 and 0, 0, 3 and 7, 7: centred 0.5, -0.5, -1, -1, 2, 0, 0, squares 6.5, over 7 - 1."""
    found = compare(batch((1.0, 0.0), (0.0, 0.0, 3.0), (7.0, 7.0)), AdvantageConfig(kind="reinforce++_baseline", eps=TINY))
    std = math.sqrt(6.5 / 6)
    assert found[0] == pytest.approx((0.5 / std, -0.5 / std)) and found[1] == pytest.approx((-1 / std, -1 / std, 2 / std))
    assert found[2] == (0.0, 0.0)


def test_groups_are_found_by_prompt_id():
    """Ids A, B, A, B, A, each in a record of its own, with 0, 5, 0, 5, 3: A is centred to -1, -1, 2."""
    groups = [group(reward, id_=id_) for id_, reward in ((7, 0.0), (3, 5.0), (7, 0.0), (3, 5.0), (7, 3.0))]
    assert [found for (found,) in compare(groups, AdvantageConfig(kind="dr_grpo"))] == [-1.0, 0.0, -1.0, 0.0, 2.0]


def test_one_row_asked_twice_is_two_groups():
    """The same row in two epochs: another id, and another mean."""
    first, second = group(0.0, 1.0, id_=4), group(1.0, 3.0, id_=104)
    second = replace(second, prompt=replace(second.prompt, row=4))
    assert compare([first, second], AdvantageConfig(kind="dr_grpo")) == [(-0.5, 0.5), (-1.0, 1.0)]


@pytest.mark.parametrize("kind", COMPARED)
def test_equal_rewards_are_exactly_zero_whatever_number_they_are(kind):
    config = AdvantageConfig(kind=kind)
    for tenth in (np.float32(0.1), float(np.float32(0.1)), 0.1):
        found = compare(batch((tenth,) * 7, (tenth,) * 3), config)
        assert found == [(0.0,) * 7, (0.0,) * 3] and all(type(value) is float for row in found for value in row)
    if kind != "reinforce++":  # against the batch a group of equal rewards may be better than another
        assert compare(batch((np.float32(0.1),) * 7, (1.0, 0.0)), config)[0] == (0.0,) * 7


@pytest.mark.parametrize("kind", [*COMPARED, "gae"])
def test_what_has_no_verdict_has_no_advantage(kind):
    config = AdvantageConfig(kind=kind)
    assert compare(batch((None, math.nan), (math.inf, None)), config) == [(None, None), (None, None)]
    assert compare([], config) == []
    single = compare(batch((None, 3.0, math.nan)), config)
    assert single == [(None, 3.0 if kind == "gae" else 0.0, None)]
    with_gaps, without = compare(batch((1.0, None, 0.0), (math.nan, 4.0)), config), compare(batch((1.0, 0.0), (4.0,)), config)
    assert [[value for value in row if value is not None] for row in with_gaps] == [list(row) for row in without]


@pytest.mark.parametrize("kind", COMPARED)
@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e-30, 1e30, 1e38, 1e200, 1.7e308])
def test_huge_and_tiny_rewards(kind, size):
    """The advantages of 1, 0, 0 and 0, -1, of that size; with eps out of the way they are the same ones. Those that keep the
    size of rewards are told of where float32 has none such."""
    groups, like = batch((size, 0.0, 0.0), (0.0, -size)), batch((1.0, 0.0, 0.0), (0.0, -1.0))
    if kind in ("dr_grpo", "rloo") and size > 1e38:
        with pytest.raises(TrainError, match=r"an advantage of .* is no finite float32 number"):
            compare(groups, AdvantageConfig(kind=kind))
        return
    if kind in ("dr_grpo", "rloo"):
        wanted = [tuple(size * value for value in row) for row in compare(like, AdvantageConfig(kind=kind))]
    else:
        wanted = compare(like, AdvantageConfig(kind=kind, eps=1e-300)) if size > 1e-100 else None
    found = compare(groups, AdvantageConfig(kind=kind, eps=1e-300 if size > 1e-100 else 1e-4))
    assert all(math.isfinite(value) for row in found for value in row)
    if wanted is not None:
        assert found == [pytest.approx(row, rel=1e-6) for row in wanted]
    else:
        assert all(abs(value) <= 1e4 * size * (1 + 1e-6) for row in found for value in row)


@pytest.mark.parametrize("std", ["sample", "population", "none"])
@pytest.mark.parametrize("kind", COMPARED)
def test_the_largest_rewards_that_there_are(kind, std):
    """3.4e38 beside three of -3.4e38: 1.5 times that above their mean. Divided by a std it is a number, else it is told."""
    groups, config = batch((LARGEST, -LARGEST, -LARGEST, -LARGEST), (0.0, LARGEST)), AdvantageConfig(kind=kind, std=std)
    if kind in ("dr_grpo", "rloo") or std == "none":
        with pytest.raises(TrainError, match=r"an advantage of \S+e\+38 is no finite float32 number: use smaller rewards"):
            compare(groups, config)
    else:
        assert all(abs(value) < 2 for row in compare(groups, config) for value in row)


def test_with_a_value_head_a_reward_that_is_no_float32_number_is_told():
    with pytest.raises(TrainError, match="an advantage of 1e\\+200"):
        compare(batch((1e200, 0.0)), AdvantageConfig(kind="gae"))


# ----------------------------------------------------------------------------------------------- independently

numbers = st.floats(-100, 100).map(lambda number: round(number, 3))
some_groups = st.lists(st.lists(st.one_of(numbers, numbers, st.none()), min_size=1, max_size=5), min_size=1, max_size=6)


def by_numpy(kind: str, groups: list[list[float]], eps: float) -> list[list[float]]:
    """As the papers write it, with arrays."""
    arrays = [np.array(rewards, np.float64) for rewards in groups]
    whole = np.concatenate(arrays)
    if kind == "reinforce++":
        std = whole.std(ddof=1) if len(whole) > 1 else 0.0
        return [list((each - whole.mean()) / (std + eps)) for each in arrays]
    centred = [each - each.mean() for each in arrays]
    if kind == "dr_grpo":
        return [list(each) for each in centred]
    if kind == "grpo":
        return [list(each / ((each.std(ddof=1) if len(each) > 1 else 0.0) + eps)) for each in centred]
    if kind == "rloo":
        return [[r - np.delete(each, i).mean() if len(each) > 1 else 0.0 for i, r in enumerate(each)] for each in arrays]
    joined = np.concatenate(centred)
    std = joined.std(ddof=1) if len(joined) > 1 else 0.0
    return [list((each - joined.mean()) / (std + eps)) for each in centred]


@settings(max_examples=150)
@given(kind=st.sampled_from(COMPARED), groups=some_groups)
def test_against_numpy(kind, groups):
    scored = [[value for value in rewards if value is not None] for rewards in groups]
    found = compare(batch(*map(tuple, groups)), AdvantageConfig(kind=kind, eps=0.01))
    assert [[value is None for value in row] for row in found] == [[value is None for value in row] for row in groups]
    wanted = by_numpy(kind, [rewards for rewards in scored if rewards], 0.01) if any(scored) else []
    kept = [[value for value in row if value is not None] for row in found]
    assert [row for row in kept if row] == [pytest.approx(row, abs=1e-8) for row in wanted]


@settings(max_examples=150)
@given(
    kind=st.sampled_from(COMPARED),
    groups=some_groups,
    shift=st.integers(-50, 50),
    scale=st.sampled_from([0.25, 2.0, 3.0, 1000.0]),
)
def test_neither_a_shift_nor_a_scale_matters(kind, groups, shift, scale):
    values = {value for rewards in groups for value in rewards if value is not None}
    assume(len(values) < 2 or min(abs(a - b) for a in values for b in values if a != b) > 1e-3)
    config = AdvantageConfig(kind=kind, eps=TINY)
    before = compare(batch(*map(tuple, groups)), config)
    factor = scale if kind in ("dr_grpo", "rloo") else 1.0
    moved = [tuple(None if value is None else value * scale + shift for value in rewards) for rewards in groups]
    for row, other in zip(before, compare(batch(*moved), config), strict=True):
        assert [value is None for value in row] == [value is None for value in other]
        wanted = [value * factor for value in row if value is not None]
        assert [value for value in other if value is not None] == pytest.approx(wanted, rel=1e-4, abs=1e-5 * factor)


@given(kind=st.sampled_from([*COMPARED, "gae"]), groups=some_groups, seed=st.integers(0, 2**32))
def test_order_does_not_matter(kind, groups, seed):
    """Groups and members in whatever order: bit for bit the same numbers."""
    config, dice, ordered = AdvantageConfig(kind=kind), random.Random(seed), batch(*map(tuple, groups))
    shuffled = [replace(each, rollouts=tuple(dice.sample(each.rollouts, len(each.rollouts)))) for each in ordered]
    dice.shuffle(shuffled)

    def known(some: list[Group]) -> dict[tuple[int, int], float | None]:
        return {
            (rollout.completion.group, rollout.completion.member): value
            for each, row in zip(some, compare(some, config), strict=True)
            for rollout, value in zip(each.rollouts, row, strict=True)
        }

    assert known(ordered) == known(shuffled)


@given(kind=st.sampled_from(GROUPWISE), groups=some_groups)
def test_a_group_sums_to_zero(kind, groups):
    for row in compare(batch(*map(tuple, groups)), AdvantageConfig(kind=kind, std="none")):
        assert math.fsum(value for value in row if value is not None) == pytest.approx(0.0, abs=1e-9)


# ---------------------------------------------------------------------------------------------------- overlong


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.CONTEXT])
def test_what_was_cut_counts_in_the_mean_and_is_not_trained_on(finish):
    one = cut(group(1.0, 0.0, 2.0), 1, finish=finish)
    assert compare([one], AdvantageConfig(kind="dr_grpo")) == [(0.0, -1.0, 1.0)]
    assert compare([one], AdvantageConfig(kind="dr_grpo", overlong="mask")) == [(0.0, None, 1.0)]


@pytest.mark.parametrize("kind", list(KINDS))
def test_all_cut(kind):
    """No row is left to train on: a batch without samples, on every rank."""
    groups = [cut(each, 0, 1, 2) for each in batch((1.0, 0.0, 0.0), (0.0, None, 1.0))]
    found = compare(groups, AdvantageConfig(kind=kind, overlong="mask"))
    assert found == [(None,) * 3] * 2
    for ranks in (1, 2):
        assert [part.samples for part in shards(0, groups, found, 100, Sampling(5), ranks)] == [()] * ranks


@given(groups=some_groups, kind=st.sampled_from(list(KINDS)), seed=st.integers(0, 2**32))
def test_masking_changes_nobody_elses_advantage(groups, kind, seed):
    dice = random.Random(seed)
    some = [cut(each, *(k for k in range(5) if dice.random() < 0.3)) for each in batch(*map(tuple, groups))]
    kept, masked = (compare(some, AdvantageConfig(kind=kind, overlong=overlong)) for overlong in ("keep", "mask"))
    for each, row, other in zip(some, kept, masked, strict=True):
        for rollout, value, left in zip(each.rollouts, row, other, strict=True):
            assert left == (None if is_cut(rollout) else value)


def is_cut(rollout: Rollout) -> bool:
    return rollout.completion.finish in (FinishReason.LENGTH, FinishReason.CONTEXT)
