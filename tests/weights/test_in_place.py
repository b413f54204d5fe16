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
    assert transport.receive(WeightVersion(3)) == manifest


async def test_only_the_version_on_offer(tmp_path):
    transport = InPlace(load(tiny_folder(tmp_path)))
    with pytest.raises(WeightSyncError, match="none is on offer"):
        transport.receive(WeightVersion(0))
    await transport.publish(WeightVersion(1))
    with pytest.raises(WeightSyncError, match="version 2 was asked for, version 1 is on offer"):
        transport.receive(WeightVersion(2))


async def test_a_change_after_publishing_is_caught(tmp_path):
    model = load(tiny_folder(tmp_path))
    transport = InPlace(model)
    await transport.publish(WeightVersion(1))
    with model.stamp.writing():
        pass
    with pytest.raises(WeightSyncError, match="changed since"):
        transport.receive(WeightVersion(1))


async def test_torn_weights_are_not_published(tmp_path):
    model = load(tiny_folder(tmp_path))
    with pytest.raises(RuntimeError), model.stamp.writing():
        raise RuntimeError
    with pytest.raises(WeightSyncError, match="half way"):
        await InPlace(model).publish(WeightVersion(1))
