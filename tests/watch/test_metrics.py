"""Statistics of a step: against the statistics module, and by adding up what members and groups have."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.types import FinishReason, Group, Reward, Rollout, Turn
from rollyard.watch.metrics import LengthCounts, RewardStats, percentile
from tests.watch.page import compare, documented
from tests.watch.records import STEP, prompt, rollout

REWARDS = st.one_of(st.none(), st.floats(-1e6, 1e6), st.sampled_from([0.1, 0.1, math.nan, math.inf, -math.inf]))
MEMBERS = st.lists(st.tuples(REWARDS, st.integers(0, 40), st.sampled_from([*FinishReason])), max_size=6)


def made(members: list[tuple[float | None, int, FinishReason]], id_: int) -> Group:
    found = []
    for member, (value, tokens, finish) in enumerate(members):
        parts = {} if value is None else {"half": value / 2} | ({"odd": 1.0} if tokens % 2 else {})
        one = rollout(id_, member, tokens, value, parts)
        found.append(replace(one, completion=replace(one.completion, finish=finish)))
    return Group(prompt(id_), tuple(found))


def verdict(each: Rollout) -> bool:
    return each.reward.value is not None and math.isfinite(each.reward.value)


@given(st.lists(MEMBERS, max_size=6))
def test_a_sum_over_members_is_the_sum_over_groups(batch) -> None:
    groups = [made(members, id_) for id_, members in enumerate(batch)]
    metrics = replace(STEP, groups=tuple(groups)).to_metrics()
    whole, each = RewardStats.whole(groups), [RewardStats.whole([group]) for group in groups]
    members = [one for group in groups for one in group.rollouts]
    scored = [one.reward.value for one in members if verdict(one)]
    assert metrics["unscored"] == len(members) - len(scored)
    assert (metrics["reward_mean"], metrics["reward_std"]) == (whole.mean, whole.std)
    assert (whole.mean is None) == (not scored)
    if scored:
        assert whole.mean == pytest.approx(statistics.fmean(scored), rel=1e-9, abs=1e-9)
        assert (whole.least, whole.most) == (min(scored), max(scored)) == (metrics["reward_min"], metrics["reward_max"])
        assert whole.std == pytest.approx(statistics.pstdev(scored), rel=1e-6, abs=1e-6)
        counts = [sum(map(verdict, group.rollouts)) for group in groups]
        by_group = math.fsum(one.mean * count for one, count in zip(each, counts, strict=True) if one.mean is not None)
        assert whole.mean * len(scored) == pytest.approx(by_group, rel=1e-9, abs=1e-6)
    assert (whole.flat, whole.groups) == (sum(one.flat for one in each), sum(one.groups for one in each))
    lengths, apart = LengthCounts.of(groups), [LengthCounts.of([group]) for group in groups]
    assert lengths.completions == len(members) == sum(one.completions for one in apart)
    assert lengths.sum == sum(len(one.completion.token_ids) for one in members) == sum(one.sum for one in apart)
    assert lengths.truncated == sum(one.truncated for one in apart)
    if groups:
        assert metrics["tokens_per_prompt"] * len(groups) == pytest.approx(lengths.sum)
    if members:
        cut = sum(one.completion.finish in ("length", "context") for one in members)
        assert metrics["completion_truncated_share"] == cut / len(members)
        assert metrics["completion_tokens_mean"] * len(members) == pytest.approx(lengths.sum)


@given(st.lists(MEMBERS, min_size=1, max_size=6), st.randoms())
def test_the_order_of_groups_and_members_does_not_matter(batch, random_: random.Random) -> None:
    groups = [made(members, id_) for id_, members in enumerate(batch)]
    shuffled = [replace(group, rollouts=tuple(random_.sample(group.rollouts, len(group.rollouts)))) for group in groups]
    random_.shuffle(shuffled)
    before, after = (replace(STEP, groups=tuple(each)).to_metrics() for each in (groups, shuffled))
    assert after == before


@given(st.lists(MEMBERS, max_size=6))
def test_each_reward_counts_the_members_that_it_gave_a_number(batch) -> None:
    groups = [made(members, id_) for id_, members in enumerate(batch)]
    metrics = replace(STEP, groups=tuple(groups)).to_metrics()
    for name in ("half", "odd"):
        given_ = [one.reward.parts[name] for group in groups for one in group.rollouts if name in one.reward.parts]
        if not given_:
            assert f"reward/{name}/mean" not in metrics
            continue
        finite = [value for value in given_ if math.isfinite(value)]
        wanted = pytest.approx(statistics.fmean(finite), rel=1e-9, abs=1e-9) if finite else None
        assert metrics[f"reward/{name}/mean"] == wanted


def test_equal_rewards_have_no_spread_whatever_the_rounding() -> None:
    """The mean of six 0.8 is not 0.8 in floating point."""
    found = RewardStats.of([[0.8] * 4, [0.8] * 2])
    assert (found.mean, found.std, found.flat, found.flat_share) == (0.8, 0.0, 2, 1.0)


def test_a_reward_whose_numbers_are_too_large_to_square() -> None:
    found = RewardStats.of([[-1e200, 1e200]])
    assert (found.mean, found.std) == (0.0, pytest.approx(1e200))


def test_groups_without_a_verdict_are_neither_flat_nor_counted() -> None:
    groups = [Group(prompt(0), (Rollout(rollout(0, 0, 3, None).completion, Reward(None, {"x": 2.0})),))]
    assert RewardStats.whole(groups) == RewardStats(None, None, 0, 0)
    assert RewardStats.part(groups, "x") == RewardStats(2.0, 0.0, 1, 1, 2.0, 2.0)


def test_percentiles_by_nearest_rank() -> None:
    fifteen_to_fifty = {15: 1, 20: 1, 35: 1, 40: 1, 50: 1}
    assert [percentile(fifteen_to_fifty, p) for p in (5, 30, 40, 50, 95, 100)] == [15, 20, 20, 35, 50, 50]
    assert percentile({7: 99, 9: 1}, 99) == 7
    assert percentile({}, 50) is None


@given(st.lists(st.integers(0, 20), min_size=1), st.integers(1, 100))
def test_a_percentile_is_the_smallest_value_with_enough_at_or_below_it(values: list[int], percent: int) -> None:
    found = percentile({value: values.count(value) for value in values}, percent)
    assert found is not None
    enough = [value for value in values if 100 * sum(other <= value for other in values) >= percent * len(values)]
    assert found == min(enough)


def test_the_page_has_the_names_that_are_written() -> None:
    assert compare(STEP.to_metrics()) == ([], [])
    assert len(documented()) == len(set(documented()))


def test_an_episode_counts_its_turns_and_the_tokens_of_all_of_them() -> None:
    """Two answers of 2 and 1 tokens, the second to what a tool said; and a member that was answered once."""
    turns = (Turn((1, 2), 2, FinishReason.STOP), Turn((1, 2, 7, 7, 9), 1, FinishReason.LENGTH))
    played = rollout(0, 0, 3, 1.0)
    played = replace(played, completion=replace(played.completion, turns=turns, finish=FinishReason.LENGTH))
    metrics = replace(STEP, groups=(Group(prompt(0), (played, rollout(0, 1, 5, 0.0))),)).to_metrics()
    assert (metrics["turns_mean"], metrics["completion_tokens_mean"], metrics["tokens_per_prompt"]) == (1.5, 4.0, 8.0)
    assert metrics["completion_truncated_share"] == 0.5  # its last answer was cut
