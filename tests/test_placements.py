"""The placements beside each other, on real parts: what is learnt does not depend on where and when the work is done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import TrainBatch, TrainStats
from rollyard.watch.report import Report
from tests.small import Curve, config, learnt

pytestmark = pytest.mark.timeout(300)
GENERATING_S = 3.0  # a batch, on a busy machine
Learn = Callable[..., tuple[Curve, Report]]


@pytest.fixture
def learn(tmp_path: Path) -> Learn:
    """A small run in order, with these options."""

    def run(**changes: object) -> tuple[Curve, Report]:
        own = {"prompts.held_out": 4, "rollout.overtaking": "never", "train.lr": 1e-3}
        return learnt(config(tmp_path / str(len(list(tmp_path.iterdir()))), **own, **changes))

    return run


def same(one: Curve, other: Curve) -> None:
    """The same tokens by the same versions; losses and gradients up to what float32 rounds, whatever ran beside what."""
    for here, there in zip(one, other, strict=True):
        assert here[:2] == there[:2]
        assert here[2:] == pytest.approx(there[2:], abs=1e-6)
    assert any(norm for *_, norm in one)


@pytest.mark.slow
def test_swap_learns_what_async_learns(learn: Learn, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a lag of one version, in order, drained, and every batch written by one version.

    Each over another transport, which changes nothing. Under async that is so where training takes longer than generating;
    else the newer version writes some of the batch.
    """
    swapped, report = learn(place__placement="swap", rollout__max_staleness=1, weights__transport="broadcast")

    async def late(self: ReferenceTrainer, shards: Sequence[TrainBatch], train=ReferenceTrainer.train) -> TrainStats:
        await asyncio.sleep(GENERATING_S)
        return await train(self, shards)

    monkeypatch.setattr(ReferenceTrainer, "train", late)
    drained = {"place__placement": "async", "rollout__max_staleness": 1, "weights__rollover": "drain"}
    overlapped, _ = learn(weights__transport="shared_memory", **drained)
    same(swapped, overlapped)
    assert len(report.weights.handed) == 3 and all(each.seconds > 0 for each in report.weights.handed)
    assert all(each.bytes > 3 * report.weights.size > 0 for each in report.weights.handed)  # two moments, and more


@pytest.mark.slow
@pytest.mark.parametrize(
    "spread",
    [{"place__train": 2}, {"place__placement": "separate", "place__generate": 2, "place__train": 2}],
    ids=["two devices in turn", "two engines and two trainers"],
)
def test_how_many_there_are_changes_nothing(learn: Learn, spread: dict[str, object]) -> None:
    same(learn()[0], learn(**spread)[0])


def flops(report: Report) -> int:
    return sum(each.flops for each in report.usage.operations if each.operation == "forward and backward")


@pytest.mark.slow
def test_trainers_that_share_the_policy_learn_what_one_learns(learn: Learn) -> None:
    """And the accounts are those of two with a copy each: tokens, FLOPs, bytes that travelled, what was proved."""
    alone, _ = learn(place__placement="separate")
    (copies, one), (apart, two) = (
        learn(place__placement="separate", place__train=2, train__shard=shared) for shared in (False, True)
    )
    same(alone, apart)
    same(copies, apart)
    assert one.tokens == two.tokens
    assert one.weights.bytes_copied == two.weights.bytes_copied > 0 and two.weights.canary is not None
    assert one.weights.canary is not None and two.weights.canary.tensors == one.weights.canary.tensors
    assert flops(one) == flops(two) > 0


@pytest.mark.ray
@pytest.mark.parametrize(
    "spread",
    [
        {"place__train": 2},
        {"place__placement": "separate", "place__generate": 2, "place__train": 2},
        {"place__placement": "separate", "place__train": 2, "train__shard": True},
    ],
    ids=["two devices in turn", "two engines and two trainers", "two trainers that share the policy"],
)
def test_actors_learn_what_this_process_learns(learn: Learn, spread: dict[str, object]) -> None:
    same(learn()[0], learn(place__runtime="ray", **spread)[0])


@pytest.mark.ray
def test_halves_that_are_actors_learn_what_children_learn(learn: Learn) -> None:
    changes = {"place.placement": "swap", "rollout.max_staleness": 1}
    same(learn(**changes)[0], learn(place__runtime="ray", **changes)[0])
