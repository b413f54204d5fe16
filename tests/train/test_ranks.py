"""Data-parallel ranks, each on a thread of this process: what they learn does not depend on how many they are."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rollyard import meeting
from rollyard.errors import NonFinite, RanksApart, StaleWeights, TrainerLost, TrainError
from rollyard.train.group import TrainerGroup
from rollyard.train.ranks import Ranks, fingerprint
from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import Sample, Sampling, TrainBatch, WeightVersion
from tests.tiny import tiny_folder
from tests.train.hosts import LOCAL, make
from tests.train.test_trainer import make_samples, parameters

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), layers=1)


@asynccontextmanager
async def group(folder: Path, size: int, limit_s: float = 20.0, **config: Any) -> AsyncIterator[tuple[list[Any], TrainerGroup]]:
    members = [make(folder, **config) for _ in range(size)]
    try:
        yield members, TrainerGroup(members, LOCAL, limit_s)
    finally:
        for member in members:
            await member.close()
            member._device.close()


SHARES = ("loss", "grad_norm", "entropy", "clipped_share", "ratio_mean")
GAPS = ("logprob_gap_mean", "logprob_gap_max", "stale_gap_mean", "stale_gap_max")


def parts(samples: list[Sample], *sizes: int, step: int = 0) -> list[TrainBatch]:
    """Parts of these sizes, in micro-batches of at most 3; what is left goes to the last one."""
    found, rest = [], list(samples)
    for number, size in enumerate(sizes):
        own, rest = (rest, []) if number == len(sizes) - 1 else (rest[:size], rest[size:])
        found.append(TrainBatch(step, tuple(tuple(own[at : at + 3]) for at in range(0, len(own), 3)), Sampling(9)))
    return found


def watch(trainer: ReferenceTrainer) -> dict[str, torch.Tensor]:
    """Gradients as the optimizer gets them."""
    found: dict[str, torch.Tensor] = {}
    step = trainer._optimizer.step

    def noting() -> None:
        found.update({name: value.grad.clone() for name, value in trainer._model.named_parameters() if value.grad is not None})
        step()

    trainer._optimizer.step = noting  # type: ignore[method-assign,assignment]
    return found


@pytest.mark.parametrize("aggregation", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("sizes", [(6, 7), (2, 10, 1), (0, 13), (13, 0, 0)])
async def test_the_number_of_ranks_changes_nothing(folder: Path, aggregation: str, sizes: tuple[int, ...]) -> None:
    """Uneven and empty parts. Three steps; clipping acts on all of the gradient. AdamW's eps is large, so that what rounding
    leaves of a gradient of zero is no step."""
    config = {"aggregation": aggregation, "max_grad_norm": 0.05, "eps": 1e-4}
    async with group(folder, 1, **config) as ((one,), alone), group(folder, len(sizes), **config) as (members, together):
        expected, found = watch(one), [watch(member) for member in members]
        for step in range(3):
            samples = make_samples(13, seed=step)
            single = await alone.train(parts(samples, 13, step=step))
            several = await together.train(parts(samples, *sizes, step=step))
            assert several.tokens == single.tokens
            for name in (*SHARES, *GAPS):
                assert getattr(several, name) == pytest.approx(getattr(single, name), abs=1e-5), name
            for gradients in found:
                for name, gradient in gradients.items():
                    torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-5)
        assert together.version == WeightVersion(3) == members[-1].version
        first = parameters(members[0])
        for name, value in parameters(one).items():
            torch.testing.assert_close(first[name], value, rtol=0, atol=1e-5)
        for member in members[1:]:
            assert all(torch.equal(value, first[name]) for name, value in parameters(member).items())


EVERYTHING = {"loss": "gspo", "correction": "truncate", "correction_level": "sequence", "kl": 0.3, "kl_kind": "k2"}
TOLD = ("loss", "grad_norm", "ratio_mean", "ratio_p1", "ratio_p99", "truncated_share", "kl", "value_loss", "clipped_share")


def valued(samples: list[Sample], values: Iterable[tuple[float, ...]]) -> list[Sample]:
    """With what was expected of them, and a return of 1 at every trained token."""
    found = []
    for each, own in zip(samples, map(iter, values), strict=True):
        expected = tuple(next(own) if on else 0.0 for on in each.mask)
        found.append(replace(each, values=expected, returns=tuple(map(float, each.mask))))
    return found


@pytest.mark.parametrize("minibatches", [1, 3])
@pytest.mark.parametrize("sizes", [(2, 10, 1), (0, 13)])
async def test_the_number_of_ranks_changes_nothing_of_an_objective(
    folder: Path, tmp_path: Path, sizes: tuple[int, ...], minibatches: int
) -> None:
    """Ratios of rows, weights of rows, a reference, a value head, percentiles; and the groups of each step are the same ones."""
    first = tiny_folder(tmp_path, layers=1, seed=3)
    config = {**EVERYTHING, "minibatches": minibatches, "eps": 1e-4, "first": first, "values": True}
    async with group(folder, 1, **config) as ((one,), alone), group(folder, len(sizes), **config) as (members, together):
        for step in range(2):
            samples = make_samples(13, seed=step)
            (expected,) = await alone.values(parts(samples, 13, step=step))
            values = [row for part in await together.values(parts(samples, *sizes, step=step)) for row in part]
            assert len(values) == 13 == len(expected)
            for own, row in zip(values, expected, strict=True):
                assert own == pytest.approx(row, abs=1e-5)
            rows = valued(samples, expected)
            single = await alone.train(parts(rows, 13, step=step))
            several = await together.train(parts(rows, *sizes, step=step))
            for name in TOLD:
                assert getattr(several, name) == pytest.approx(getattr(single, name), abs=2e-5), name
        expected_state = one.state()
        for member in members:
            for name, tensor in member.state().items():
                if "random" not in name:
                    torch.testing.assert_close(tensor, expected_state[name], rtol=0, atol=2e-5)


async def test_no_number_in_a_later_step_tears_all_ranks_alike(folder: Path) -> None:
    samples = make_samples(12)
    inf = [replace(each, advantages=tuple(math.inf if on else 0.0 for on in each.mask)) for each in samples]
    spoilt = [*samples[:8], inf[8], *samples[9:]]  # of the last of three groups
    async with group(folder, 2, minibatches=3) as (members, together):
        with pytest.raises(TrainError, match=r"^step 1, minibatch 3 of 3: .*steps before it were taken"):
            await together.train(parts(spoilt, 3, 9))
        assert not any(member._model.stamp.whole for member in members)


async def test_a_part_that_is_not_finite_stops_all_alike_and_changes_nothing(folder: Path) -> None:
    samples = make_samples(6)
    spoilt = replace(samples[5], advantages=tuple(math.inf if flag else 0.0 for flag in samples[5].mask))
    async with group(folder, 3) as (members, together):
        before = [parameters(member) for member in members]
        with pytest.raises(NonFinite, match=r"^step 1: .*as before$"):
            await together.train(parts([*samples[:5], spoilt], 2, 2, 2))
        for member, values in zip(members, before, strict=True):
            assert member.version == WeightVersion(0) == together.version
            assert all(torch.equal(value, values[name]) for name, value in parameters(member).items())
            assert all(value.grad is None for value in member._model.parameters())
        assert (await together.train(parts(samples, 2, 2, 2))).step == 1


async def test_a_rank_that_fails_is_named_and_the_others_do_not_wait(folder: Path) -> None:
    """What it met is told, not what the others met because of it. Afterwards they meet anew, and it works."""
    samples = make_samples(6)
    first = replace(samples[0], mask=(True,) * len(samples[0].mask))
    async with group(folder, 3, limit_s=20.0) as (members, together):
        before, began = parameters(members[0]), time.monotonic()
        with pytest.raises(ValueError, match="nothing predicts its first token"):
            await together.train(parts([*samples[1:5], first], 2, 2, 1))
        for member in members:
            await member._device.run(int)  # nobody waits for anybody any more
        assert time.monotonic() - began < 5
        assert all(torch.equal(value, before[name]) for name, value in parameters(members[0]).items())
        assert (await together.train(parts(samples, 2, 2, 2))).step == 1


async def test_a_rank_that_never_answers_is_named(folder: Path) -> None:
    """The others give up at their time limit."""
    async with group(folder, 3, limit_s=0.7) as (members, together):
        go_on = threading.Event()
        members[1]._accumulate = lambda *args: go_on.wait(20)
        began = time.monotonic()
        with pytest.raises(TrainerLost, match=r"rank 1 did not answer: rank 0 of 3 lost the others, adding up gradients"):
            await together.train(parts(make_samples(6), 2, 2, 2))
        assert time.monotonic() - began < 4
        go_on.set()
        assert members[0].version == WeightVersion(0) and members[0]._model.stamp.whole


async def test_a_rank_that_does_not_come_to_the_meeting_is_named(folder: Path) -> None:
    async with group(folder, 2, limit_s=0.7) as (members, together):
        members[1].join = lambda *args: asyncio.sleep(600)
        with pytest.raises(TrainerLost, match=r"rank 1 did not answer: rank 0 of 2 lost the others, meeting"):
            await together.train(parts(make_samples(6), 3, 3))


async def test_parameters_that_drifted_apart_are_found_and_used_no_more(folder: Path) -> None:
    async with group(folder, 3) as (members, together):
        await together.train(parts(make_samples(6), 2, 2, 2))
        with torch.no_grad():
            members[2]._model.model.norm.weight[3] += 1e-3
        with pytest.raises(TrainError, match="step 2: the parameters of rank 2 are not those of rank 0"):
            await together.train(parts(make_samples(6), 2, 2, 2, step=1))
        assert members[0].version == WeightVersion(1)
        with pytest.raises(StaleWeights):
            members[0]._model.stamp.check(members[0]._model.stamp.generation)


async def test_a_rank_that_is_gone_while_parameters_change_leaves_those_of_the_others_torn(folder: Path) -> None:
    """Nobody knows then whether it has the new ones: they are neither used nor counted as the old ones."""
    async with group(folder, 2) as (members, together):

        def gone(step: int) -> None:
            raise TrainError("gone")

        members[1]._gradients.check = gone
        with pytest.raises(TrainError, match="rank 1: gone"):
            await together.train(parts(make_samples(6), 3, 3))
        assert together.version == members[0].version == WeightVersion(0)
        with pytest.raises(StaleWeights):
            members[0]._model.stamp.check(members[0]._model.stamp.generation)
        await members[0].join("", 0, 1, 1.0)
        with pytest.raises(StaleWeights, match="half way"):
            await members[0].train(parts(make_samples(6), 6))


async def test_ranks_of_different_versions_do_not_train(folder: Path) -> None:
    async with group(folder, 2) as (members, together):
        await members[1].become(WeightVersion(1))
        with pytest.raises(TrainError, match="trains version 0, the parameters are version 0 and 1"):
            await together.train(parts(make_samples(6), 3, 3))


async def test_each_rank_needs_one_part(folder: Path) -> None:
    async with group(folder, 2) as (members, together):
        with pytest.raises(TrainError, match="2 ranks train on as many parts of a batch, not on 1"):
            await together.train(parts(make_samples(6), 6))
        with pytest.raises(TrainError, match="one rank trains on one part of a batch, not on 2"):
            await members[0].train(parts(make_samples(6), 3, 3))


async def test_whoever_left_a_group_does_not_train_alone(folder: Path) -> None:
    async with group(folder, 2) as (members, together):
        await together.train(parts(make_samples(6), 3, 3))
        members[0]._ranks.leave()
        with pytest.raises(RanksApart, match="rank 0 of 2 left the group"):
            await members[0].train(parts(make_samples(6), 6, step=1))
        await members[0].join("", 0, 1, 1.0)
        assert (await members[0].train(parts(make_samples(6), 6, step=1))).step == 2


def listening(port: int) -> set[str]:
    tables = [Path(table).read_text().splitlines() for table in ("/proc/net/tcp", "/proc/net/tcp6")]
    every = [line.split() for table in tables for line in table]
    return {fields[1] for fields in every if fields[3] == "0A" and fields[1].endswith(f":{port:04X}")}


async def test_the_meeting_listens_on_its_own_address_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []
    real = meeting.dist.ProcessGroupGloo

    class Watched(real):  # type: ignore[misc]
        @staticmethod
        def create_device(hostname: str) -> Any:
            bound.append(hostname)
            return real.create_device(hostname=hostname)

    monkeypatch.setattr(meeting.dist, "ProcessGroupGloo", Watched)
    ours = [Ranks(CPU), Ranks(CPU)]
    place = ours[0].open("127.0.0.2", 5.0)
    port = int(place.partition("/")[0].rpartition(":")[2])
    await asyncio.gather(*(asyncio.to_thread(each.join, place, rank, 2, 5.0) for rank, each in enumerate(ours)))
    found = await asyncio.gather(*(asyncio.to_thread(each.gather, torch.tensor([rank])) for rank, each in enumerate(ours)))
    assert [each.flatten().tolist() for each in found] == [[0, 1], [0, 1]]
    assert listening(port) == {f"0200007F:{port:04X}"}
    assert sorted(bound) == ["127.0.0.1", "127.0.0.2"]  # the other one's is the one it reaches the meeting from
    for each in ours:
        each.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(TrainError, match=r"cannot meet at 192\.0\.2\.1"):
        Ranks(CPU).open("192.0.2.1", 5.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_sees_the_last_bit_of_any_number(dtype: torch.dtype) -> None:
    values = [torch.randn(5, 3).to(dtype), torch.randn(7).to(dtype), torch.tensor([0.5], dtype=dtype)]
    before = fingerprint(values)
    assert torch.equal(fingerprint([value.clone() for value in values]), before)
    for value in values:
        for place in range(value.numel()):
            bits = value.view(-1).view(torch.uint8)
            bits[place * dtype.itemsize] ^= 1
            assert not torch.equal(fingerprint(values), before)
            bits[place * dtype.itemsize] ^= 1


async def two(limit_s: float) -> tuple[str, list[Ranks]]:
    """Where they have met, and they."""
    ours = [Ranks(CPU), Ranks(CPU)]
    place = ours[0].open(LOCAL, limit_s)
    await asyncio.gather(*(asyncio.to_thread(each.join, place, rank, 2, limit_s) for rank, each in enumerate(ours)))
    return place, ours


async def test_whoever_comes_to_a_meeting_that_is_over_is_turned_away_at_once() -> None:
    """The others are there still, and listen: gloo itself would try five times, each as long as the limit."""
    place, ours = await two(5.0)
    ours[1].leave()
    began = time.monotonic()
    with pytest.raises(RanksApart, match="meeting: another process was rank 1 of this group"):
        Ranks(CPU).join(place, 1, 2, 5.0)
    assert time.monotonic() - began < 2
    for each in ours:
        each.close()


def test_one_that_comes_and_falls_silent_holds_the_others_no_longer_than_is_said() -> None:
    """It has said that it is there, and gives no address: seconds for a connection are few, however long a step may take."""
    store = meeting.held_store(LOCAL, 60.0)
    meeting.dist.PrefixStore("m", store).add("at-rank 1", 1)
    began = time.monotonic()
    with pytest.raises(RuntimeError):
        meeting.new_group(store, "m", 0, 2, CPU, LOCAL, 12.0)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("what", ["gather", "bring"])
async def test_a_wait_for_another_rank_has_the_limit_of_a_step_not_that_of_connecting(what: str) -> None:
    _, ours = await two(1.8)
    began = time.monotonic()
    with pytest.raises(RanksApart):
        ours[0].gather(torch.zeros(1)) if what == "gather" else ours[0].bring(torch.zeros(1), 1)
    assert 1.6 < time.monotonic() - began < 4
    for each in ours:
        each.close()
