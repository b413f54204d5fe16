"""Weights that do not move: only what was published, unchanged since, is received."""

from __future__ import annotations

import pytest

from rollyard.errors import WeightSyncError
from rollyard.model.folder import load
from rollyard.types import WeightVersion
from rollyard.weights.in_place import InPlace
from tests.tiny import tiny_folder


async def test_nothing_is_copied_and_every_tensor_is_named(tmp_path):
    model = load(tiny_folder(tmp_path))
    transport = InPlace(model)
    manifest = await transport.publish(WeightVersion(3))
    assert manifest.bytes_copied == 0 and manifest.version == WeightVersion(3)
    assert {info.name: info.shape for info in manifest.tensors} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    transport.prepare(manifest)
    assert transport.take(WeightVersion(3)) is None


async def test_only_the_version_on_offer(tmp_path):
    transport = InPlace(load(tiny_folder(tmp_path)))
    with pytest.raises(WeightSyncError, match="nothing was prepared"):
        transport.take(WeightVersion(0))
    await transport.publish(WeightVersion(1))
    with pytest.raises(WeightSyncError, match="version 2 was asked for, version 1 was prepared"):
        transport.take(WeightVersion(2))


async def test_a_change_after_publishing_is_caught(tmp_path):
    model = load(tiny_folder(tmp_path))
    transport = InPlace(model)
    await transport.publish(WeightVersion(1))
    with model.stamp.writing():
        pass
    with pytest.raises(WeightSyncError, match="changed since"):
        transport.take(WeightVersion(1))


async def test_torn_weights_are_not_published(tmp_path):
    model = load(tiny_folder(tmp_path))
    with pytest.raises(RuntimeError), model.stamp.writing():
        raise RuntimeError
    with pytest.raises(WeightSyncError, match="half way"):
        await InPlace(model).publish(WeightVersion(1))


async def test_weights_torn_after_publishing_are_not_received(tmp_path):
    model = load(tiny_folder(tmp_path))
    transport = InPlace(model)
    await transport.publish(WeightVersion(1))
    with pytest.raises(RuntimeError), model.stamp.writing():
        raise RuntimeError
    with pytest.raises(WeightSyncError, match="changed since version 1"):
        transport.take(WeightVersion(1))


async def test_names_on_one_side_only_are_an_error(tmp_path):
    """A tied head is no tensor of its own; an untied one that is gone when received is missed by name."""
    tied = await InPlace(load(tiny_folder(tmp_path))).publish(WeightVersion(0))
    assert "lm_head.weight" not in {info.name for info in tied.tensors}
    model = load(tiny_folder(tmp_path, tied=False))
    transport = InPlace(model)
    manifest = await transport.publish(WeightVersion(0))
    del model.lm_head
    with pytest.raises(WeightSyncError, match=r"one side: lm_head\.weight$"):
        transport.prepare(manifest)


async def test_another_life_of_the_run_is_another_version(tmp_path):
    transport = InPlace(load(tiny_folder(tmp_path)))
    await transport.publish(WeightVersion(1, 0))
    with pytest.raises(WeightSyncError, match="version 1 of incarnation 2 was asked for, version 1 was prepared"):
        transport.take(WeightVersion(1, 2))
