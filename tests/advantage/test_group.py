"""Advantages by hand, and properties that hold whatever the rewards."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.advantage.compare import compare
from rollyard.config import AdvantageConfig
from rollyard.types import Completion, FinishReason, Group, Prompt, Reward, Rollout, VersionSpan, WeightVersion

SPAN = VersionSpan(WeightVersion(0), WeightVersion(0), 1)


def group(*rewards: float | None, id_: int = 0) -> Group:
    prompt = Prompt(id_, id_, (1,), "p")
    rollouts = (
        Rollout(Completion(id_, k, (5,), (-1.0,), (SPAN,), FinishReason.STOP, "x"), Reward(reward))
        for k, reward in enumerate(rewards)
    )
    return Group(prompt, tuple(rollouts))


def advantages(one: Group, config: AdvantageConfig) -> tuple[float | None, ...]:
    return compare([one], config)[0]


TINY = 1e-12  # eps small enough to compare with hand calculations


def test_two_prompts_by_hand():
    """Rewards A 0, 0, 3 and B 5, 5: centred -1, -1, 2 and 0, 0; sample std of A is sqrt(3)."""
    a, b = group(0.0, 0.0, 3.0, id_=0), group(5.0, 5.0, id_=1)
    assert advantages(a, AdvantageConfig(kind="dr_grpo")) == (-1.0, -1.0, 2.0)
    assert advantages(b, AdvantageConfig(kind="dr_grpo")) == (0.0, 0.0)
    assert advantages(a, AdvantageConfig(eps=TINY)) == pytest.approx((-0.57735, -0.57735, 1.154701), abs=1e-5)
    assert advantages(b, AdvantageConfig()) == (0.0, 0.0)


def test_kinds_of_standard_deviation():
    """Rewards 0, 1: mean 0.5, sample std sqrt(0.5), population std 0.5."""
    values = {std: advantages(group(0.0, 1.0), AdvantageConfig(std=std, eps=TINY)) for std in ("sample", "population", "none")}
    assert values["sample"] == pytest.approx((-math.sqrt(0.5), math.sqrt(0.5)))
    assert values["population"] == pytest.approx((-1.0, 1.0))
    assert values["none"] == (-0.5, 0.5)


def test_rloo_by_hand():
    """1, 2, 6 against the mean of the others: 1 - 4, 2 - 3.5, 6 - 1.5."""
    assert advantages(group(1.0, 2.0, 6.0), AdvantageConfig(kind="rloo")) == pytest.approx((-3.0, -1.5, 4.5))


def test_no_verdict_is_no_zero():
    without_std = AdvantageConfig(std="none")
    assert advantages(group(1.0, None, 0.0), without_std) == (0.5, None, -0.5)
    assert advantages(group(1.0, math.nan, 0.0), without_std) == (0.5, None, -0.5)
    assert advantages(group(1.0, -math.inf, 0.0), without_std) == (0.5, None, -0.5)
    assert advantages(group(None, 1.0, None), AdvantageConfig()) == (None, 0.0, None)
    assert advantages(group(None, None), AdvantageConfig()) == (None, None)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_are_exactly_zero(kind):
    tenth = 0.10000000149011612  # float32's 0.1
    # The mean of six 0.8, and of two 0.1 out of three, is not exactly that value in floating point.
    for rewards in ([tenth] * 7, [0.8] * 6, [0.1] * 3):
        assert advantages(group(*rewards), AdvantageConfig(kind=kind)) == (0.0,) * len(rewards)


@given(st.lists(st.one_of(st.none(), st.floats(-1e3, 1e3)), min_size=1, max_size=12))
def test_grpo_against_the_statistics_module(rewards):
    found = advantages(group(*rewards), AdvantageConfig(eps=1e-4))
    scored = [reward for reward in rewards if reward is not None]
    assert [value is None for value in found] == [reward is None for reward in rewards]
    if len(scored) < 2:
        assert all(value in (None, 0.0) for value in found)
        return
    # In fractions: the reference must not round a mean that the code under test gets right.
    mean, std = statistics.mean(map(Fraction, scored)), statistics.stdev(scored)
    for reward, value in zip(rewards, found, strict=True):
        if reward is not None:
            assert value == pytest.approx(float(Fraction(reward) - mean) / (std + 1e-4), rel=1e-6, abs=1e-9)


def test_large_rewards_do_not_overflow():
    """0 and 1e200: the squares are beyond float64, the advantages are those of 0 and 1."""
    assert advantages(group(0.0, 1e200), AdvantageConfig()) == pytest.approx((-math.sqrt(0.5), math.sqrt(0.5)))
