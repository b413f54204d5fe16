"""The same weights as the reference trainer's, whatever loop they come from, and what of a run ends how."""

from __future__ import annotations

import asyncio
import runpy
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import rollyard
from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.model.folder import load, tensors
from rollyard.objective import options_of
from rollyard.place.inline import DeviceThread
from rollyard.train.external import TrainerSetup
from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import WeightVersion
from tests.rewards import share_of_a
from tests.small import config, learnt

TRAINERS = Path(__file__).parent.parent / "examples" / "external_trainer" / "trainers.py"
STEPS = 4
STATS = ("loss", "grad_norm", "learning_rate")


def last_weights(out: Path) -> dict[str, Tensor]:
    """Of the last checkpoint of a run."""
    return tensors(load(sorted((out / "checkpoints").iterdir())[-1]))


async def with_the_reference_trainer(config_: Config) -> None:
    """A loop of one's own around our trainer, with a model of its own."""
    async with AsyncExitStack() as closing, rollyard.Rollouts(config_, reward=share_of_a) as rollouts:
        device = DeviceThread()
        closing.callback(device.close)
        await device.run(torch.set_num_threads, 1)
        model = load(rollouts.model)
        trainer = ReferenceTrainer(
            model, device, options_of(config_), config_.rollout.max_tokens, rollouts.model, WeightVersion(0)
        )
        async for batch in rollouts.batches():
            stats = await trainer.train([batch.train])
            await rollouts.publish(model, {name: getattr(stats, name) for name in STATS})
    assert rollouts.report is not None and not rollouts.report.finished.failed


async def with_transformers(config_: Config) -> Path:
    """A loop of one's own with transformers' model and torch's optimizer. Returns the folder that it began with."""
    async with rollyard.Rollouts(config_, reward=share_of_a) as rollouts:
        options = options_of(config_)
        make = runpy.run_path(str(TRAINERS))["hugging_face"]
        trainer = make(TrainerSetup(rollouts.model, options, "float32", "cpu", config_.rollout.max_tokens, WeightVersion(0)))
        async for batch in rollouts.batches():
            stats = await asyncio.to_thread(trainer.train, batch.train)
            await rollouts.publish(trainer.model, {name: getattr(stats, name) for name in STATS})
        return rollouts.model


def far_apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    out = tmp_path_factory.mktemp("reference") / "run"
    learnt(config(out, **OPTIONS))
    return last_weights(out)


OPTIONS: dict[str, Any] = {"run.steps": STEPS, "train.lr": 1e-3, "prompts.held_out": 0}


async def test_our_trainer_in_a_loop_of_ones_own_makes_the_very_same_weights(
    tmp_path: Path, reference: dict[str, Tensor]
) -> None:
    await with_the_reference_trainer(config(tmp_path / "run", **OPTIONS))
    found = last_weights(tmp_path / "run")
    assert all(torch.equal(found[name], tensor) for name, tensor in reference.items())


async def test_a_plain_loop_with_the_same_loss_makes_the_same_weights(tmp_path: Path, reference: dict[str, Tensor]) -> None:
    begun = tensors(load(await with_transformers(config(tmp_path / "run", **OPTIONS))))
    found = last_weights(tmp_path / "run")
    assert far_apart(found, reference) < 1e-6 < 1e-3 < far_apart(reference, begun)


async def test_who_resumes_it_without_its_trainer_is_told(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="batch 0"):
        async with rollyard.Rollouts(config(tmp_path / "run", **OPTIONS), reward=share_of_a) as rollouts:
            await rollouts.next_batch()
    with pytest.raises(ConfigError, match=r"given its trainer in Python.*Rollouts.resume"):
        async for _ in rollyard.Run.resume(tmp_path / "run", reward=share_of_a):
            raise AssertionError
