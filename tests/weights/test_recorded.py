"""Versions in folders, whose trainer is out of reach: what it left beside them is enough to know what engines decode with."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from rollyard.errors import WeightSyncError
from rollyard.model.architecture import Architecture
from rollyard.model.folder import WEIGHTS, load, save
from rollyard.model.transformer import CausalLM
from rollyard.place.inline import DeviceThread
from rollyard.types import Verdict, WeightVersion
from rollyard.weights.checkpoint import CheckpointReceiver
from rollyard.weights.evidence import Evidence
from rollyard.weights.flat import model_infos
from rollyard.weights.prover import Prover
from rollyard.weights.record import MANIFEST
from rollyard.weights.recorded import RecordedWeights
from tests.tiny import tiny_folder
from tests.weights.moving import step
from tests.weights.proving import Answering

V0, V1 = WeightVersion(0), WeightVersion(1)
CPU = torch.device("cpu")


@pytest.fixture
async def device() -> AsyncIterator[DeviceThread]:
    made = DeviceThread(lambda: torch.set_num_threads(1))
    yield made
    made.close()


@pytest.fixture
async def versions(tmp_path: Path, device: DeviceThread) -> tuple[Path, Path]:
    """The model, and a folder with two versions of it, as a training job leaves them."""
    source, where = tiny_folder(tmp_path), tmp_path / "weights"
    trainer = load(source)
    for version in (V0, V1):
        save(trainer, where / str(version.step), source)
        await Evidence(trainer, device).record(version, where / str(version.step))
        step(trainer, version.step)
    return source, where


def recorded(source: Path, where: Path, device: DeviceThread, offered: list[int] | None = None) -> RecordedWeights:
    told = [] if offered is None else offered
    shape, scratch = Architecture.from_folder(source), where.parent / "canary"
    return RecordedWeights(
        lambda version: where / str(version.step),
        lambda version: told.append(version.step),
        shape,
        torch.float32,
        device,
        scratch,
    )


class Loading:
    """Engines that read what they are offered; one may leave a tensor behind."""

    def __init__(self, weights: RecordedWeights, source: Path, lazy: str = "") -> None:
        self._weights, self.model, self._lazy = weights, load(source), lazy
        self._receiver = CheckpointReceiver(model_infos(self.model), CPU)

    async def take(self, version: WeightVersion) -> None:
        self._receiver.prepare(await self._weights.publish(version, ["e0"]))
        taken = self._receiver.take(version)
        with torch.no_grad(), self.model.stamp.writing():
            for name, parameter in self.model.named_parameters():
                if name != self._lazy:
                    parameter.copy_(taken[name])


async def test_a_version_is_offered_where_it_lies(versions: tuple[Path, Path], device: DeviceThread) -> None:
    told: list[int] = []
    weights = recorded(*versions, device, told)
    engine = Loading(weights, versions[0])
    await engine.take(V1)
    assert told == [1]
    expected = load(versions[1] / "1")
    assert all(torch.equal(a, b) for a, b in zip(engine.model.parameters(), expected.parameters(), strict=True))
    assert (await weights.again(["e0"])).source == str(versions[1] / "1")
    (versions[1] / "1" / MANIFEST).write_bytes((versions[1] / "0" / MANIFEST).read_bytes())
    with pytest.raises(WeightSyncError, match="holds version 0, not version 1"):
        await weights.publish(V1, ["e0"])


async def test_bytes_that_are_not_the_trainers_do_not_arrive(versions: tuple[Path, Path], device: DeviceThread) -> None:
    weights = recorded(*versions, device)
    (versions[1] / "1" / WEIGHTS).write_bytes((versions[1] / "0" / WEIGHTS).read_bytes())
    with pytest.raises(WeightSyncError, match="arrived changed"):
        await Loading(weights, versions[0]).take(V1)


async def test_the_probe_tells_versions_apart(versions: tuple[Path, Path], device: DeviceThread) -> None:
    weights = recorded(*versions, device)
    old, new = load(versions[1] / "0"), load(versions[1] / "1")
    asks = Answering(device, {"old": old, "new": new})
    await weights.published(V0, ["old", "new"])
    assert (await weights.check("old", await asks.answers("old"))).old == math.inf
    await weights.published(V1, ["old", "new"])
    assert (await weights.check("new", await asks.answers("new"))).verdict is Verdict.VERIFIED
    assert (await weights.check("old", await asks.answers("old"))).verdict is Verdict.CONTRADICTED


@pytest.mark.parametrize("lazy", ["", "model.norm.weight"])
async def test_the_canary_moves_what_lies_there(versions: tuple[Path, Path], device: DeviceThread, lazy: str) -> None:
    weights = recorded(*versions, device)
    engine = Loading(weights, versions[0])
    await engine.take(V1)
    engine = Loading(weights, versions[1] / "1", lazy)
    prover = Prover(weights, Answering(device, {"e0": engine.model}))
    if lazy:
        with pytest.raises(WeightSyncError, match=f"as if {lazy} had stayed"):
            await prover.prove(["e0"], V1, engine.take)
    else:
        found = await prover.prove(["e0"], V1, engine.take)
        assert found.unseen == () and found.gap < found.limit
        assert same(engine.model, load(versions[1] / "1"))
    weights.close()
    assert not (versions[1].parent / "canary").exists()


async def test_a_canary_sees_a_folder_that_is_another_models(versions: tuple[Path, Path], device: DeviceThread) -> None:
    weights = recorded(*versions, device)
    engine = Loading(weights, versions[0])
    await engine.take(V1)
    (versions[1] / "1" / WEIGHTS).write_bytes((versions[1] / "0" / WEIGHTS).read_bytes())
    with pytest.raises(WeightSyncError, match="is not what its trainer had"):
        await Prover(weights, Answering(device, {"e0": engine.model})).prove(["e0"], V1, engine.take)


def same(one: CausalLM, other: CausalLM) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
