"""Weights of ranks that share one model: published a tensor at a time, and looked at by all ranks together."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from rollyard.bench.memory import memory, reset_peak
from rollyard.errors import TrainerLost, TrainError, WeightSyncError
from rollyard.model.folder import load
from rollyard.model.transformer import CausalLM
from rollyard.protocols.weights import Receiver
from rollyard.types import Verdict, WeightVersion
from rollyard.weights.prover import Prover
from tests.tiny import tiny_folder
from tests.train.sharing import Shared, shared
from tests.train.test_ranks import parts
from tests.train.test_trainer import make_samples
from tests.weights.freezing import freezing
from tests.weights.moving import MOVING, receiver

pytestmark = pytest.mark.slow

V0, V1 = WeightVersion(0), WeightVersion(1)
MIB = 2**20


async def send(both: Shared, receiving: Receiver, version: WeightVersion) -> dict[str, torch.Tensor]:
    manifest = await both.publisher.publish(version, ("e0",))
    await asyncio.gather(both.publisher.deliver(), asyncio.to_thread(receiving.prepare, manifest))
    both.publisher.taken("e0", version)
    taken = receiving.take(version)
    assert taken is not None
    return dict(taken)


def same(arrived: dict[str, torch.Tensor], model: CausalLM) -> bool:
    expected = dict(model.named_parameters())
    return arrived.keys() == expected.keys() and all(torch.equal(tensor, expected[name]) for name, tensor in arrived.items())


@pytest.mark.parametrize("kind", MOVING)
async def test_engines_get_whole_tensors(tmp_path: Path, kind: str) -> None:
    """To the bit those of the checkpoint, which are written by another way. Rows do not divide evenly."""
    folder = tiny_folder(tmp_path, "qwen2", False, vocab=53)
    async with shared(folder, tmp_path / "scratch", 3, kind=kind) as all_:
        receiving = receiver(kind, load(folder), "e0")
        assert same(await send(all_, receiving, V0), load(folder))
        for step in range(2):
            await all_.trainer.train(parts(make_samples(9, seed=step), 4, 3, 2, step=step))
            arrived = await send(all_, receiving, WeightVersion(step + 1))
            await all_.trainer.save(tmp_path / str(step))
            assert same(arrived, load(tmp_path / str(step)))
        receiving.close()


async def test_an_offer_that_fails_on_one_rank_is_made_again(tmp_path: Path) -> None:
    """An engine that decodes with either slot leaves none; the other ranks do not wait for what rank 0 does not collect."""
    folder = tiny_folder(tmp_path, layers=1)
    async with shared(folder, tmp_path / "scratch", 2) as both:
        publisher = both.publisher
        for version, engine in ((V0, "e0"), (V1, "e1")):
            await publisher.publish(version, ("e0", "e1"))
            publisher.taken(engine, version)
        with pytest.raises(WeightSyncError, match="finds no free slot: e0 has version 0, e1 has version 1"):
            await publisher.publish(WeightVersion(2), ("e0", "e1"))
        publisher.lost("e1")
        receiving = receiver("shared_memory", load(folder), "e0")
        assert same(await send(both, receiving, WeightVersion(2)), load(folder))
        receiving.close()
        both.children[1].kill()
        with pytest.raises(TrainerLost, match=r"^rank 1: the trainer is lost: trainer-1"):
            await publisher.publish(WeightVersion(3), ("e0",))


async def test_each_tensor_that_stays_behind_is_caught_and_named_by_two_ranks(tmp_path: Path) -> None:
    """Then the parameters are as they were, to the bit, and a probe tells new weights from old ones."""
    folder = tiny_folder(tmp_path, layers=1)
    async with shared(folder, tmp_path / "scratch", 2) as both, freezing(folder, both.publisher) as there:
        await there.roll(V0)
        prover = Prover(both.evidence, there.ask)
        found = await prover.prove(["e0"], V0, there.roll)
        assert found.unseen == () and found.gap <= found.limit and found.tensors == len(list(load(folder).parameters()))
        for name, _ in load(folder).named_parameters():
            await there.freeze(name)
            with pytest.raises(WeightSyncError, match="e0 does not decode with all the weights that it was sent") as told:
                await prover.prove(["e0"], V0, there.roll)
            assert name in str(told.value)
            await there.freeze("")
            await there.roll(V0)
        receiving = receiver("shared_memory", load(folder), "e1")
        assert same(await send(both, receiving, V0), load(folder))
        receiving.close()
        await prover.published(V0)
        await both.trainer.train(parts(make_samples(9), 4, 5))
        await there.roll(V1)
        await prover.published(V1)
        assert await prover.check("e0") is Verdict.VERIFIED


async def test_a_move_that_breaks_on_one_rank_is_put_back(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, layers=1)
    async with shared(folder, tmp_path / "scratch", 2) as both, freezing(folder, both.publisher) as there:
        await there.roll(V0)
        await both.children[1].call("spoil", json.dumps({"at": 30, "how": "fail"}).encode(), limit_s=5.0)
        with pytest.raises(TrainError, match=r"^rank 1: the trainer failed: OSError: out of luck"):
            await Prover(both.evidence, there.ask).prove(["e0"], V0, there.roll)
        assert (await Prover(both.evidence, there.ask).prove(["e0"], V0, there.roll)).unseen == ()


def resident(both: Shared) -> list[float]:
    """MiB of each rank at most, since the last time."""
    return [memory(child.pid)[0].value for child in both.children]


@pytest.mark.parametrize("kind", ("checkpoint", "shared_memory", "broadcast"))
async def test_nobody_holds_the_whole_model(tmp_path: Path, kind: str) -> None:
    """While it is published or written, rank 0 has one tensor more than before, and the others hardly anything."""
    folder = tiny_folder(tmp_path, width=1024, layers=8, vocab=12000)
    tensors = [parameter.numel() * 4 / MIB for parameter in load(folder).parameters()]
    whole, largest = sum(tensors), max(tensors)
    assert whole > 5 * largest > 200
    async with shared(folder, tmp_path / "scratch", 2, kind=kind) as both:
        receiving = receiver(kind, load(folder), "e0")
        await send(both, receiving, V0)  # what a transport has for itself, it has then

        async def publish() -> None:
            await send(both, receiving, V1)

        async def save() -> None:
            await both.trainer.save(tmp_path / "saved")

        for what in (publish, save):
            for child in both.children:
                reset_peak(child.pid)
            before = resident(both)
            await what()
            first, second = (after - had for after, had in zip(resident(both), before, strict=True))
            assert first < 1.5 * largest + 16 and second < 16
        receiving.close()
