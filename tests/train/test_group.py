"""Trainers in processes of their own, as one."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollyard.errors import CheckpointError, NonFinite, RanksApart, TrainerLost, TrainError
from rollyard.model.folder import load
from rollyard.place.child import Child
from rollyard.train.group import TrainerGroup
from rollyard.types import TrainBatch, TrainStats, WeightVersion
from tests.tiny import tiny_folder
from tests.train.hosts import LOCAL, children, make
from tests.train.test_ranks import parts
from tests.train.test_trainer import make_samples, parameters


class Scripted:
    """A member that answers its step with what it is given, after some seconds."""

    def __init__(self, answer: BaseException | TrainStats, after_s: float = 0.0) -> None:
        self.version = WeightVersion(0)
        self.calls: list[str] = []
        self._answer, self._after_s = answer, after_s

    async def open(self, address: str, limit_s: float) -> str:
        self.calls.append("open")
        return "somewhere"

    async def join(self, place: str, rank: int, size: int, limit_s: float) -> None:
        self.calls.append(f"join {place} {rank} {size}")

    async def train(self, shards: list[TrainBatch]) -> TrainStats:
        await asyncio.sleep(self._after_s)
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer

    async def settle(self) -> WeightVersion:
        return self.version

    async def save(self, folder: Path) -> None: ...

    async def become(self, version: WeightVersion) -> None:
        self.version = version

    async def close(self) -> None:
        self.calls.append("close")


STATS = TrainStats(1, 0.5, 1.0, 1e-3, 9, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)
APART = RanksApart("lost the others")


@pytest.mark.parametrize(
    ("members", "kind", "message"),
    [
        ([Scripted(APART), Scripted(TrainerLost("trainer 1 was ended"), 0.1)], TrainerLost, "rank 1: trainer 1 was ended"),
        ([Scripted(APART), Scripted(STATS, 9), Scripted(APART)], TrainerLost, "rank 1 did not answer: lost the others"),
        ([Scripted(APART), Scripted(APART), Scripted(TrainError("no"), 0.1)], TrainError, "rank 2: no"),
        ([Scripted(TrainError("no")), Scripted(TrainerLost("gone"))], TrainerLost, "rank 1: gone"),
        ([Scripted(NonFinite("step 0")), Scripted(NonFinite("step 0"))], NonFinite, "step 0"),
        ([Scripted(STATS), Scripted(CheckpointError("disk full"))], CheckpointError, "disk full"),
        ([Scripted(APART), Scripted(APART)], RanksApart, "lost the others"),
    ],
)
async def test_the_first_cause_is_told(members: list[Scripted], kind: type[Exception], message: str) -> None:
    together = TrainerGroup(members, LOCAL, 5.0)  # type: ignore[arg-type]
    with pytest.raises(kind) as met:
        await together.train(parts([], *[0] * len(members)))
    assert str(met.value) == message and type(met.value) is kind
    assert together.version == WeightVersion(0)


async def test_ranks_meet_once_and_anew_after_a_failure() -> None:
    members = [Scripted(STATS), Scripted(STATS)]
    together = TrainerGroup(members, LOCAL, 5.0)  # type: ignore[arg-type]
    for _ in range(2):
        assert await together.train(parts([], 0, 0)) is STATS
    assert [each.calls for each in members] == [["open", "join somewhere 0 2"], ["join somewhere 1 2"]]
    members[1]._answer = TrainError("no")
    with pytest.raises(TrainError):
        await together.train(parts([], 0, 0))
    members[1]._answer = STATS
    await together.train(parts([], 0, 0))
    assert [each.calls[-1] for each in members] == ["join somewhere 0 2", "join somewhere 1 2"] and len(members[0].calls) == 4
    await together.become(WeightVersion(7))
    assert {each.version for each in (together, *members)} == {WeightVersion(7)}
    await together.close()
    assert all(each.calls[-1] == "close" for each in members)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), layers=1)


async def told(child: Child) -> dict[str, list]:
    return json.loads(await child.call("digest", limit_s=20.0))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(13,), (4, 9), (0, 12, 1)])
async def test_processes_learn_what_one_trainer_learns(folder: Path, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Their parameters are the same to the bit, and those of one trainer but for rounding. Rank 0 writes the checkpoint."""
    one = make(folder)
    async with children(folder, len(sizes)) as (launched, together):
        for step in range(3):
            samples = make_samples(13, seed=step)
            single = await one.train(parts(samples, 13, step=step))
            several = await together.train(parts(samples, *sizes, step=step))
            assert several.loss == pytest.approx(single.loss, abs=1e-5)
            assert several.grad_norm == pytest.approx(single.grad_norm, abs=1e-5)
        first, *others = [await told(child) for child in launched]
        assert all(other == first for other in others) and together.version == WeightVersion(3)
        for name, value in parameters(one).items():
            there = torch.tensor(first[name], dtype=torch.int32).view(torch.float32)
            torch.testing.assert_close(there, value, rtol=0, atol=1e-4)
        spoilt = [replace(each, advantages=tuple(math.nan if flag else 0.0 for flag in each.mask)) for each in samples[:1]]
        with pytest.raises(NonFinite, match="step 4: "):
            await together.train(parts([*samples[1:], *spoilt], *sizes, step=3))
        assert [await told(child) for child in launched] == [first] * len(sizes)
        await together.save(tmp_path / "saved")
        saved = {name: value.view(torch.int32).tolist() for name, value in load(tmp_path / "saved").named_parameters()}
        assert saved == first
        with pytest.raises(CheckpointError, match="exists"):
            await together.save(tmp_path / "saved")
    one._device.close()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_killed_in_a_step_is_named_within_two_seconds(folder: Path, rank: int) -> None:
    samples = make_samples(9)
    async with children(folder, 3) as (launched, together):
        await together.train(parts(samples, 3, 3, 3))
        before = await told(launched[2])
        await launched[rank].call("die", limit_s=5.0)
        began = time.monotonic()
        with pytest.raises(TrainerLost, match=rf"^rank {rank}: trainer {rank} is lost: trainer {rank} was ended by signal 9"):
            await together.train(parts(samples, 3, 3, 3, step=1))
        assert time.monotonic() - began < 2
        assert together.version == WeightVersion(1) and await told(launched[2]) == before
        left = TrainerGroup([member for at, member in enumerate(together._members) if at != rank], LOCAL, 20.0)
        assert (await left.train(parts(samples, 4, 5, step=1))).step == 2


@pytest.mark.slow
async def test_a_rank_that_never_answers_is_named_at_the_time_limit(folder: Path) -> None:
    async with children(folder, 3, limit_s=2.0) as (launched, together):
        await together.train(parts(make_samples(9), 3, 3, 3))
        await launched[2].call("hang", limit_s=5.0)
        began = time.monotonic()
        with pytest.raises(TrainerLost, match=r"^rank 2 did not answer: rank 0 of 3 lost the others, adding up gradients"):
            await together.train(parts(make_samples(9), 3, 3, 3, step=1))
        assert 1.5 < time.monotonic() - began < 6
        left = TrainerGroup(together._members[:2], LOCAL, 20.0)
        assert (await left.train(parts(make_samples(9), 4, 5, step=1))).step == 2
