"""Ranks that share one model learn what one trainer with all of it learns, and go on from each other's checkpoints."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollyard.errors import CheckpointError, NonFinite, TrainerLost, TrainError
from rollyard.model.folder import load
from rollyard.types import Sample, TrainStats, WeightVersion
from tests.tiny import tiny_folder
from tests.train.hosts import make
from tests.train.sharing import Shared, shared
from tests.train.test_ranks import parts, valued
from tests.train.test_trainer import make_samples, parameters

pytestmark = pytest.mark.slow

SIZES = {1: (13,), 2: (6, 7), 3: (2, 11, 0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), layers=2)


def alike(several: TrainStats, single: TrainStats, rel: float = 1e-4) -> None:
    assert (several.step, several.tokens) == (single.step, single.tokens)
    for name in ("loss", "grad_norm", "entropy", "ratio_mean", "logprob_gap_mean", "logprob_gap_max", "stale_gap_mean"):
        assert getattr(several, name) == pytest.approx(getattr(single, name), rel=rel, abs=1e-6), name


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3", False)])
async def test_two_ranks_learn_what_one_learns(tmp_path: Path, family: str, tied: bool) -> None:
    """Also when they have different numbers of passes, or one has none. The gradients are clipped."""
    model, config = tiny_folder(tmp_path, family, tied), {"max_grad_norm": 0.05, "lr": 1e-3}
    one = make(model, **config)
    async with shared(model, tmp_path / "scratch", 2, **config) as both:
        for step in range(20):
            samples = make_samples(13, seed=step)
            single = await one.train(parts(samples, 13, step=step))
            several = await both.trainer.train(parts(samples, *((6, 7), (2, 11), (13, 0))[step % 3], step=step))
            alike(several, single)
        await both.trainer.save(tmp_path / "saved")
        saved = dict(load(tmp_path / "saved").named_parameters())
        for name, value in parameters(one).items():
            torch.testing.assert_close(saved[name].detach(), value, rtol=0, atol=1e-5)
        with pytest.raises(CheckpointError, match="saved exists"):
            await both.trainer.save(tmp_path / "saved")
    one._device.close()


async def test_ranks_that_share_a_policy_share_the_first_one_too(folder: Path, tmp_path: Path) -> None:
    """A reference in parts, a value head beside the parts, logprobs before the first of two steps; uneven and empty ranks."""
    config: dict[str, Any] = {
        "loss": "gspo", "correction": "truncate", "minibatches": 2, "kl": 0.3, "lr": 1e-3, "values": True, "max_grad_norm": 0.05,
    }  # fmt: skip
    one = make(folder, first=folder, **config)
    async with shared(folder, tmp_path / "scratch", 2, **config) as both:
        for step in range(3):
            samples, sizes = make_samples(13, seed=step), ((6, 7), (2, 11), (13, 0))[step]
            (expected,) = await one.values(parts(samples, 13, step=step))
            found = [row for part in await both.trainer.values(parts(samples, *sizes, step=step)) for row in part]
            for own, row in zip(found, expected, strict=True):
                assert own == pytest.approx(row, abs=1e-5)
            rows = valued(samples, expected)
            single, several = (
                await one.train(parts(rows, 13, step=step)),
                await both.trainer.train(parts(rows, *sizes, step=step)),
            )
            alike(several, single)
            assert several.kl == pytest.approx(single.kl, abs=1e-6) and (several.kl is not None and several.kl >= 0)
            assert several.value_loss == pytest.approx(single.value_loss, rel=1e-4)
        await both.trainer.save(tmp_path / "saved")
    fresh = make(tmp_path / "saved", first=folder, **config)
    await fresh.load_state(tmp_path / "saved")
    state = one.state()
    for name, tensor in fresh.state().items():
        if "random" not in name:
            torch.testing.assert_close(tensor, state[name], rtol=0, atol=1e-5)
    for each in (one, fresh):
        each._device.close()


def spoilt(samples: list[Sample]) -> list[Sample]:
    last = samples[-1]
    return [*samples[:-1], replace(last, advantages=tuple(math.inf if flag else 0.0 for flag in last.mask))]


async def test_a_failure_in_the_midst_of_a_pass_changes_nothing(folder: Path, tmp_path: Path) -> None:
    """Wherever it comes, on whatever rank. They meet anew, and learn what they would have learnt without it."""
    one, samples = make(folder), make_samples(13)
    async with shared(folder, tmp_path / "scratch", 2) as both:
        for step in range(6):
            batch, before = parts(samples, 6, 7, step=step), time.monotonic()
            await both.children[step % 2].call("spoil", json.dumps({"at": 1 + 2 * step, "how": "fail"}).encode(), limit_s=5.0)
            with pytest.raises(TrainError, match=f"^rank {step % 2}: trainer-{step % 2} failed: OSError: out of luck"):
                await both.trainer.train(batch)
            assert time.monotonic() - before < 10 and both.trainer.version == WeightVersion(step)
            alike(await both.trainer.train(batch), await one.train(parts(samples, 13, step=step)))
        with pytest.raises(NonFinite, match=r"^step 7: .*as before$"):
            await both.trainer.train(parts(spoilt(samples), 6, 7, step=6))
        alike(await both.trainer.train(parts(samples, 6, 7, step=6)), await one.train(parts(samples, 13, step=6)))
    one._device.close()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_killed_in_a_pass_is_named_at_once(folder: Path, tmp_path: Path, rank: int) -> None:
    async with shared(folder, tmp_path / "scratch", 3) as all_:
        await all_.trainer.train(parts(make_samples(13), *SIZES[3]))
        await all_.children[rank].call("spoil", b'{"at": 4, "how": "die"}', limit_s=5.0)
        began = time.monotonic()
        with pytest.raises(TrainerLost, match=rf"^rank {rank}: trainer-{rank} is lost: trainer-{rank} was ended by signal 9"):
            await all_.trainer.train(parts(make_samples(13), *SIZES[3], step=1))
        assert time.monotonic() - began < 3


async def test_a_rank_that_never_answers_is_named_at_the_time_limit(folder: Path, tmp_path: Path) -> None:
    async with shared(folder, tmp_path / "scratch", 2, limit_s=3.0) as both:
        await both.trainer.train(parts(make_samples(13), 6, 7))
        await both.children[1].call("spoil", b'{"at": 4, "how": "hang"}', limit_s=5.0)
        with pytest.raises(TrainerLost, match=r"^rank 1 did not answer: rank 0 of 2 lost the others, gathering parameters"):
            await both.trainer.train(parts(make_samples(13), 6, 7, step=1))


async def test_parts_of_a_model_are_of_one_group_only(folder: Path, tmp_path: Path) -> None:
    async with shared(folder, tmp_path / "scratch", 2) as both:
        with pytest.raises(TrainError, match="has part 1 of 2 of the model, and cannot be rank 0 of 1"):
            await both.trainer._members[1].join("", 0, 1, 1.0)


async def trained(ranks: Shared, size: int, steps: range) -> list[TrainStats]:
    return [await ranks.trainer.train(parts(make_samples(13, seed=step), *SIZES[size], step=step)) for step in steps]


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
async def test_training_goes_on_with_another_number_of_ranks(folder: Path, tmp_path: Path, before: int, after: int) -> None:
    """As if nothing had been in between; moments and the count of steps come too."""
    at, scratch = tmp_path / "checkpoint", tmp_path / "scratch"
    async with shared(folder, scratch, before, lr=1e-3) as first:
        await trained(first, before, range(3))
        await first.trainer.save(at)
        expected = await trained(first, before, range(3, 5))
    async with shared(at, scratch, after, lr=1e-3, state=at) as second:
        found = await trained(second, after, range(3, 5))
    for several, single in zip(found, expected, strict=True):
        alike(several, single, rel=1e-6)


async def test_ranks_that_do_different_things_say_so(folder: Path, tmp_path: Path) -> None:
    """Which nobody asks for; what they would exchange then would be anything."""
    async with shared(folder, tmp_path / "scratch", 2) as both:
        publisher, trainer = both.publisher._ranks[0], both.trainer._members[1]
        with pytest.raises(TrainError, match="and another rank for something else"):
            await both.trainer.together(
                [lambda: publisher.publish(WeightVersion(0), ("e0",)), lambda: trainer.train(parts(make_samples(3), 3))]
            )
