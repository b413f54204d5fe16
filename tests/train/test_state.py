"""The training state as tensors: handed over, it is as if the other trainer had trained all along."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from rollyard.errors import TrainError
from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import Sampling, TrainBatch, WeightVersion
from tests.tiny import tiny_folder
from tests.train.test_trainer import make_samples, parameters, split, trainer


def batch(step: int) -> TrainBatch:
    return TrainBatch(step, split(make_samples(seed=step), 2), Sampling(9))


def hand_over(source: ReferenceTrainer, target: ReferenceTrainer) -> None:
    """What a transport does: other tensors, with the same contents."""
    sent = {name: tensor.clone() for name, tensor in source.state().items()}
    with target._model.stamp.writing(), torch.no_grad():
        for name, tensor in target.state().items():
            tensor.copy_(sent[name])


def shapes(state: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("traded_at", [0, 1, 2])
async def test_two_that_trade_roles_learn_what_one_learns_alone(folder: Path, tmp_path: Path, traded_at: int) -> None:
    """The other one had trained something else before. Parameters and all else, to the bit."""
    alone, first, second = trainer(folder, lr=1e-3), trainer(folder, lr=1e-3), trainer(folder, lr=1e-3)
    for step in range(3):
        await second.train([TrainBatch(step, split(make_samples(seed=9), 1), Sampling(9))])
    for step in range(traded_at):
        for each in (alone, first):
            await each.train([batch(step)])
    generation = second._model.stamp.generation
    hand_over(first, second)
    await second.become(WeightVersion(traded_at, 5))
    assert second.version == WeightVersion(traded_at, 5) and second._model.stamp.generation == generation + 1
    for step in range(traded_at, traded_at + 2):
        expected, found = await alone.train([batch(step)]), await second.train([batch(step)])
        assert found == expected
    left, right = alone.state(), second.state()
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())
    assert parameters(first).keys() <= left.keys()


async def test_names_shapes_and_formats_are_always_the_same(folder: Path) -> None:
    """Before the first step all that AdamW remembers is zero. The tensors are those that are trained, no copies."""
    ours = trainer(folder)
    before = ours.state()
    own = dict(ours._model.named_parameters())
    expected = {f"{part}{name}": value.shape for part in ("", "exp_avg/", "exp_avg_sq/") for name, value in own.items()}
    expected |= {f"step/{name}": torch.Size() for name in own} | {"random/cpu": torch.get_rng_state().shape}
    assert {name: tensor.shape for name, tensor in before.items()} == expected
    assert all(not tensor.any() for name, tensor in before.items() if "/" in name and "random" not in name)
    formats = shapes(before)
    await ours.train([batch(0)])
    after = ours.state()
    assert shapes(after) == formats and list(after) == list(before)
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == {n: tensor.data_ptr() for n, tensor in before.items()}
    assert all(tensor == 1 for name, tensor in after.items() if name.startswith("step/"))
    assert all(not tensor.requires_grad for tensor in after.values())


async def test_the_random_state_goes_along(folder: Path) -> None:
    first, second = trainer(folder), trainer(folder)
    torch.manual_seed(5)
    hand_over(first, second)
    expected = torch.rand(3)
    torch.rand(10)
    await second.become(WeightVersion(0))
    assert torch.equal(torch.rand(3), expected)


async def test_a_state_that_was_not_written_to_the_end_is_refused(folder: Path) -> None:
    ours = trainer(folder)
    with pytest.raises(KeyError), ours._model.stamp.writing():
        raise KeyError("the line broke")
    with pytest.raises(TrainError, match="version 4 is not whole"):
        await ours.become(WeightVersion(4))
    assert ours.version == WeightVersion(0)


async def test_a_checkpoint_holds_the_random_state_too(folder: Path, tmp_path: Path) -> None:
    ours = trainer(folder)
    torch.manual_seed(6)
    await ours.save(tmp_path / "saved")
    expected = torch.rand(3)
    resumed = trainer(tmp_path / "saved")
    await resumed.load_state(tmp_path / "saved")
    assert torch.equal(torch.rand(3), expected)
