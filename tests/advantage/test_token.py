"""GAE by hand, against NumPy, and over a batch of rows."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollyard.advantage.compare import compare
from rollyard.advantage.token import gae, spread
from rollyard.config import AdvantageConfig
from rollyard.errors import TrainError
from rollyard.types import LARGEST, Sample, Sampling, TrainBatch
from tests.advantage.test_group import group


def test_by_hand():
    """Rewards 0, 0, 1, values 0.5, 0.25, 0.75, gamma 0.5, lambda 0.5: deltas -0.375, 0.125, 0.25."""
    found = gae([0.0, 0.0, 1.0], [0.5, 0.25, 0.75], 0.5, 0.5)
    assert found == [-0.375 + 0.25 * (0.125 + 0.25 * 0.25), 0.125 + 0.25 * 0.25, 0.25]


def test_the_two_ends_of_lambda():
    """1: what came minus what was expected. 0: what is expected next minus what was expected."""
    values = [0.5, 0.25, 0.75]
    assert gae([0.0, 0.0, 2.0], values, 1.0, 1.0) == [1.5, 1.75, 1.25]
    assert gae([0.0, 0.0, 2.0], values, 1.0, 0.0) == [-0.25, 0.5, 1.25]
    assert gae([], [], 1.0, 1.0) == []


@given(
    rows=st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=1, max_size=12),
    gamma=st.floats(0.1, 1),
    lam=st.floats(0, 1),
)
def test_against_the_sum_in_the_paper(rows, gamma, lam):
    """Equation 16: the sum over l of (gamma lambda)^l delta_(t + l)."""
    rewards, values = np.array(rows).T
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    wanted = [((gamma * lam) ** np.arange(len(rows) - t) * deltas[t:]).sum() for t in range(len(rows))]
    assert gae(list(rewards), list(values), gamma, lam) == pytest.approx(wanted, abs=1e-9)


def row(member: int, mask: str, reward: float, part: int = 0) -> Sample:
    flags = tuple(flag == "1" for flag in mask)
    numbers = tuple(reward * flag for flag in flags)
    return Sample(0, member, tuple(range(len(mask))), flags, (0.0,) * len(mask), numbers, (), part)


def batches(*shards: list[list[Sample]]) -> list[TrainBatch]:
    return [TrainBatch(3, tuple(tuple(micro) for micro in shard), Sampling(9)) for shard in shards]


def test_rows_by_hand():
    """Rewards 1 and 0, values 0.5 before each token: advantages 0.5, 0.5 and -0.5; mean 1/6, population std sqrt(2/9)."""
    config = AdvantageConfig(kind="gae", std="population", eps=1e-12)
    parts = batches([[row(0, "0101", 1.0)], [row(1, "001", 0.0)]])
    (found,) = spread(parts, [[[0.5, 0.5], [0.5]]], config)
    first, second = found.samples
    high, low = (0.5 - 1 / 6) / math.sqrt(2 / 9), (-0.5 - 1 / 6) / math.sqrt(2 / 9)
    assert first.advantages == pytest.approx((0.0, high, 0.0, high)) and second.advantages == pytest.approx((0.0, 0.0, low))
    assert first.values == (0.0, 0.5, 0.0, 0.5) and first.returns == (0.0, 1.0, 0.0, 1.0)
    assert second.values == (0.0, 0.0, 0.5) and second.returns == (0.0, 0.0, 0.0)
    assert (found.step, found.sampling, [len(micro) for micro in found.micro_batches]) == (3, Sampling(9), [1, 1])


def test_each_row_of_an_episode_has_the_reward_at_its_end():
    parts = batches([[row(0, "0011", 2.0), row(0, "0001", 2.0, part=1)]])
    (found,) = spread(parts, [[[0.0, 0.0], [0.0]]], AdvantageConfig(kind="gae", gamma=0.5, std="none"))
    assert [sample.returns for sample in found.samples] == [(0.0, 0.0, 1.0, 2.0), (0.0, 0.0, 0.0, 2.0)]


def test_equal_is_exactly_zero():
    """Seven rewards of float32's 0.1, and a value head that knows nothing: nothing to learn, to the bit."""
    tenth = float(np.float32(0.1))
    parts = batches([[row(k, "011", tenth) for k in range(7)]])
    (found,) = spread(parts, [[[0.3, 0.3]] * 7], AdvantageConfig(kind="gae"))
    assert {value for sample in found.samples for value in sample.advantages} == {0.0}


@given(seed=st.integers(0, 2**32), cut=st.integers(0, 6))
def test_shards_and_micro_batches_do_not_matter(seed, cut):
    dice = random.Random(seed)
    samples = [row(k, "0" * dice.randint(0, 2) + "1" * dice.randint(0, 4), dice.gauss(0, 1)) for k in range(6)]
    values = [[dice.gauss(0, 1) for _ in range(sum(sample.mask))] for sample in samples]
    config = AdvantageConfig(kind="gae", lam=0.9)
    (whole,) = spread(batches([samples]), [values], config)
    apart = spread(batches([samples[:cut]], [[sample] for sample in samples[cut:]]), [values[:cut], values[cut:]], config)
    assert whole.samples == tuple(sample for part in apart for sample in part.samples)
    trained = [value for sample in whole.samples for value, flag in zip(sample.advantages, sample.mask, strict=True) if flag]
    assert math.fsum(trained) == pytest.approx(0.0, abs=1e-6)


def test_nothing_to_spread():
    for parts in (batches([], []), batches([[]])):
        assert spread(parts, [[] for _ in parts], AdvantageConfig(kind="gae")) == tuple(parts)
    (found,) = spread(batches([[row(0, "00", 0.0)]]), [[[]]], AdvantageConfig(kind="gae"))
    assert found.samples[0].advantages == found.samples[0].values == found.samples[0].returns == (0.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_head_that_says_nothing_sensible(value):
    with pytest.raises(TrainError, match="value head"):
        spread(batches([[row(0, "011", 1.0)]]), [[[0.0, value]]], AdvantageConfig(kind="gae"))


def test_an_advantage_that_no_float32_holds():
    """A reward of 3.4e38 where -3.4e38 was expected, and the other way round: whitened they are 1 and -1."""
    parts = batches([[row(0, "01", LARGEST), row(1, "01", -LARGEST)]])
    values = [[[-LARGEST], [LARGEST]]]
    with pytest.raises(TrainError, match=r"an advantage of 6\.8\S+e\+38 is no finite float32 number"):
        spread(parts, values, AdvantageConfig(kind="gae", std="none"))
    (found,) = spread(parts, values, AdvantageConfig(kind="gae", std="population"))
    assert [sample.advantages for sample in found.samples] == [(0.0, 1.0), (0.0, -1.0)]
    assert [sample.returns for sample in found.samples] == [(0.0, LARGEST), (0.0, -LARGEST)]


def test_until_then_rewards_stay_what_they_are():
    assert compare([group(1.0, None, 0.25)], AdvantageConfig(kind="gae")) == [(1.0, None, 0.25)]
