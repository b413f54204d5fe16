"""What all transports that move bytes promise: the tensors that were published arrive, or one clear error says why not."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rollyard.errors import WeightSyncError
from rollyard.model.folder import load
from rollyard.types import TensorInfo, WeightVersion
from rollyard.weights import layout, receive
from tests.tiny import tiny_folder
from tests.weights.moving import MOVING, receiver, sides, spoilt, step


@pytest.mark.parametrize("kind", MOVING)
@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
async def test_every_version_arrives_bit_for_bit(tmp_path: Path, kind: str, tied: bool, dtype: torch.dtype) -> None:
    folder = tiny_folder(tmp_path, tied=tied, family="qwen2")
    model = load(folder, dtype)
    async with sides(kind, model, folder, engines=2) as both:
        before: dict[str, torch.Tensor] = {}
        for number in range(5):
            sent = step(model, number)
            manifest = await both.send(number)
            assert manifest.version == WeightVersion(number)
            for one in both.receivers.values():
                arrived = one.take(WeightVersion(number))
                assert arrived is not None and arrived.keys() == sent.keys()
                assert all(torch.equal(arrived[name], sent[name]) for name in sent)
            if before:  # an engine may still decode with what it took last
                assert any(not torch.equal(before[name], sent[name]) for name in sent)
            both.taken(number)
            before = sent


@pytest.mark.parametrize("kind", MOVING)
async def test_what_was_taken_stays_until_the_version_after_the_next(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder) as both:
        first = step(model, 0)
        await both.send(0)
        taken = both.receivers["e0"].take(WeightVersion(0))
        both.taken(0)
        step(model, 1)
        await both.send(1)
        assert taken is not None and all(torch.equal(taken[name], first[name]) for name in first)


@pytest.mark.parametrize("kind", MOVING)
@pytest.mark.parametrize("seed", range(3))
async def test_no_offer_touches_what_was_taken(tmp_path: Path, kind: str, seed: int) -> None:
    """Offers that arrive, offers that fail, offers made again, in a random order: what an engine decodes with stays."""
    folder, dice = tiny_folder(tmp_path, layers=1), random.Random(seed)
    model = load(folder)
    async with sides(kind, model, folder) as both:
        one, version, prepared = both.receivers["e0"], 0, False
        kept: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []  # what was taken, and what it must be
        for _ in range(25):
            if prepared and dice.random() < 0.4:
                taken = one.take(WeightVersion(version))
                assert taken is not None
                kept = [*kept[-1:], (dict(taken), {name: tensor.clone() for name, tensor in taken.items()})]
                both.taken(version)
                prepared = False
            else:
                kept = kept[-1:]  # this is the version after the next
                if dice.random() < 0.7:
                    version += 1
                    step(model, version)
                prepared = await both.try_(version, spoil=dice.random() < 0.5)
            for taken, wanted in kept:
                assert all(torch.equal(taken[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", MOVING)
async def test_a_version_that_was_not_prepared_is_not_taken(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder) as both:
        with pytest.raises(WeightSyncError, match="version 0 was asked for, nothing was prepared"):
            both.receivers["e0"].take(WeightVersion(0))
        await both.send(0)
        with pytest.raises(WeightSyncError, match="version 1 was asked for, version 0 was prepared"):
            both.receivers["e0"].take(WeightVersion(1))


@pytest.mark.parametrize("kind", MOVING)
async def test_torn_weights_are_not_published(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder) as both:
        with pytest.raises(RuntimeError), model.stamp.writing():
            raise RuntimeError
        with pytest.raises(WeightSyncError, match="half way"):
            await both.publisher.publish(WeightVersion(1), ("e0",))


@pytest.mark.parametrize("kind", MOVING)
async def test_names_that_do_not_match_are_told_and_the_next_sync_works(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder) as both:
        manifest = await both.publisher.publish(WeightVersion(1), ())
        other = replace(manifest, tensors=(*manifest.tensors[:-1], TensorInfo("model.extra", (64,), "torch.float32")))
        with pytest.raises(WeightSyncError, match=r"only on one side: model\.extra, model\.norm\.weight"):
            both.receivers["e0"].prepare(other)
        await both.publisher.deliver()
        sent = step(model, 2)
        await both.send(2)
        arrived = both.receivers["e0"].take(WeightVersion(2))
        assert arrived is not None and all(torch.equal(arrived[name], sent[name]) for name in sent)


@pytest.mark.parametrize("kind", MOVING)
async def test_bytes_that_changed_on_the_way_are_noticed(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides(kind, model, folder) as both:
        manifest = await both.publisher.publish(WeightVersion(1), ("e0",))
        preparing = asyncio.to_thread(both.receivers["e0"].prepare, spoilt(manifest, both.receivers["e0"]))
        outcome, _ = await asyncio.gather(preparing, both.publisher.deliver(), return_exceptions=True)
        assert isinstance(outcome, WeightSyncError) and "model.norm.weight of version 1 arrived changed" in str(outcome)


# ------------------------------------------------------------------------------------------------- broadcast


async def test_a_receiver_that_dies_at_a_bucket_is_told_and_the_next_sync_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path, tied=False)
    model = load(folder)
    size = sum(parameter.numel() * 4 for parameter in model.parameters())
    monkeypatch.setattr(layout, "BUCKET", -(-size // 3 // 64) * 64 + 64)
    received = []

    class Dying(receive.Group):
        def _start(self, bucket: torch.Tensor) -> object:
            received.append(len(bucket))
            if len(received) == 2:
                raise RuntimeError("Connection closed by peer")
            return super()._start(bucket)

    async with sides("broadcast", model, folder, limit_s=2.0) as both:
        await both.send(0)
        whole = both.receivers["e0"]
        kept = whole.take(WeightVersion(0))
        monkeypatch.setattr(receive, "Group", Dying)
        whole._group = None  # type: ignore[attr-defined]
        both.publisher._group = None  # type: ignore[attr-defined]
        both.publisher._groups += 1  # type: ignore[attr-defined]
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match=r"version 1 did not reach e0, (at bucket \d of 3|before the first bucket)"):
            await both.send(1)
        assert time.monotonic() - began < 15 and len(received) == 2
        assert kept is not None
        monkeypatch.undo()
        sent = step(model, 2)
        await both.send(2)
        arrived = whole.take(WeightVersion(2))
        assert arrived is not None and all(torch.equal(arrived[name], sent[name]) for name in sent)


async def test_a_receiver_that_never_comes_is_told_in_time_and_the_next_sync_works(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("broadcast", model, folder, limit_s=2.0) as both:
        await both.publisher.publish(WeightVersion(1), ("e0",))
        began = time.monotonic()
        with pytest.raises(WeightSyncError, match="version 1 did not reach e0, before the first bucket"):
            await both.publisher.deliver()
        assert time.monotonic() - began < 10
        sent = step(model, 2)
        await both.send(2)
        arrived = both.receivers["e0"].take(WeightVersion(2))
        assert arrived is not None and all(torch.equal(arrived[name], sent[name]) for name in sent)


async def test_a_group_follows_the_engines_that_are_left(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("broadcast", model, folder, engines=3, limit_s=5.0) as both:
        await both.send(0)
        both.receivers.pop("e1").close()
        both.publisher.lost("e1")
        sent = step(model, 1)
        await both.send(1)
        arrived = both.receivers["e2"].take(WeightVersion(1))
        assert arrived is not None and all(torch.equal(arrived[name], sent[name]) for name in sent)


# --------------------------------------------------------------------------------------------- shared memory


async def test_a_slot_that_an_engine_decodes_with_is_not_written(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("shared_memory", model, folder, engines=2) as both:
        for number in (0, 1):
            step(model, number)
            await both.send(number)
            both.publisher.taken("e0", WeightVersion(number))
        both.publisher.taken("e1", WeightVersion(0))  # it did not take version 1
        step(model, 2)
        with pytest.raises(WeightSyncError, match="version 2 finds no free slot: e0 has version 1, e1 has version 0"):
            await both.publisher.publish(WeightVersion(2), ("e0", "e1"))
        both.publisher.lost("e1")
        await both.publisher.publish(WeightVersion(2), ("e0",))


async def test_memory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("shared_memory", model, folder) as both:
        manifest = await both.send(0)
        late = receiver("shared_memory", model, "e9")
        with pytest.raises(WeightSyncError, match="cannot be mapped"):
            late.prepare(replace(manifest, source="/proc/1/fd/999999#0"))


# ------------------------------------------------------------------------------------------------ checkpoint


async def test_only_the_newest_folder_stays_and_none_after_the_end(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("checkpoint", model, folder) as both:
        manifests = [await both.send(number) for number in range(3)]
        assert [path.name for path in (tmp_path / "scratch").iterdir()] == [Path(manifests[-1].source).name]
        loaded = load(Path(manifests[-1].source))  # a whole Hugging Face folder
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    assert not (tmp_path / "scratch").exists()


async def test_a_broken_file_is_an_error(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path)
    model = load(folder)
    async with sides("checkpoint", model, folder) as both:
        manifest = await both.publisher.publish(WeightVersion(0), ("e0",))
        weights = Path(manifest.source) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        with pytest.raises(WeightSyncError, match="version 0 cannot be read from"):
            both.receivers["e0"].prepare(manifest)
