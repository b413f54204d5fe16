"""From groups to the trainer: what is compared how, and what a trainer is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollyard.config import Config
from rollyard.learner import TrainerLearner
from rollyard.types import FinishReason, Group, TrainBatch, TrainStats, WeightVersion
from tests.advantage.test_group import group


class Told:
    """A trainer that keeps what it is given, and expects `expected` before every token."""

    def __init__(self, expected: float = 0.0) -> None:
        self.expected = expected
        self.asked: list[Sequence[TrainBatch]] = []
        self.trained: list[Sequence[TrainBatch]] = []
        self.version = WeightVersion(4)

    async def values(self, shards: Sequence[TrainBatch]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        self.asked.append(shards)
        return tuple(tuple((self.expected,) * sum(sample.mask) for sample in part.samples) for part in shards)

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        self.trained.append(shards)
        return TrainStats(5, 0.0, 0.0, 0.0, 0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0)


async def learnt(trainer: Told, groups: list[Group], ranks: int = 1, **options: object) -> Sequence[TrainBatch]:
    config = Config.model_validate({"advantage": options})
    told: list[Sequence[TrainBatch]] = []
    await TrainerLearner(config, trainer, ranks, told.append).learn(4, groups)  # type: ignore[arg-type]
    assert told == trainer.trained
    return trainer.trained[0]


@pytest.mark.parametrize("ranks", [1, 3])
async def test_with_a_value_head_what_it_expects_is_asked_first(ranks):
    """Rewards 1 and 0 against 0.25 expected, one token each: advantages 0.75 and -0.25, whitened with a std of sqrt(1/2)."""
    trainer = Told(0.25)
    parts = await learnt(trainer, [group(1.0, None, 0.0)], ranks, kind="gae", eps=1e-12)
    assert len(parts) == ranks and [len(part.samples) for part in trainer.asked[0]] == [len(part.samples) for part in parts]
    samples = {sample.member: sample for part in parts for sample in part.samples}
    assert samples.keys() == {0, 2}
    assert samples[0].advantages == pytest.approx((0.0, 0.5**0.5)) and samples[2].advantages == pytest.approx((0.0, -(0.5**0.5)))
    assert samples[0].values == samples[2].values == (0.0, 0.25)
    assert samples[0].returns == (0.0, 1.0) and samples[2].returns == (0.0, 0.0)


async def test_without_a_value_head_nothing_is_asked():
    trainer = Told()
    (part,) = await learnt(trainer, [group(1.0, 0.0)], kind="dr_grpo")
    assert trainer.asked == [] and [sample.advantages[-1] for sample in part.samples] == [0.5, -0.5]
    assert all(sample.values == sample.returns == () for sample in part.samples)


@pytest.mark.parametrize("kind", ["grpo", "reinforce++", "gae"])
async def test_a_batch_of_which_nothing_is_to_be_trained(kind):
    """All were cut, and what is cut is masked: a step all the same, with nothing in it."""
    one = group(1.0, 0.0)
    rollouts = tuple(replace(each, completion=replace(each.completion, finish=FinishReason.LENGTH)) for each in one.rollouts)
    parts = await learnt(Told(), [replace(one, rollouts=rollouts)], 2, kind=kind, overlong="mask")
    assert [part.samples for part in parts] == [(), ()] and {part.step for part in parts} == {4}
