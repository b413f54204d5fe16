"""Folders of an exchange: an empty one, and one that waits for a training job with a real, tiny model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rollyard.config import Config
from rollyard.exchange.folder import Folder
from rollyard.types import Completion, FinishReason, Group, Prompt, Reward, Rollout, VersionSpan, WeightVersion
from tests.small import config
from tests.tiny import tiny_folder

STEPS = 2


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    made = Folder(tmp_path / "shared")
    made.make()
    return made


def group(id_: int, version: int) -> Group:
    span = VersionSpan(WeightVersion(version), WeightVersion(version), 3)
    done = [Completion(id_, k, (5 + k, 6 + id_, 1), (-2.0, -2.5, -3.0), (span,), FinishReason.STOP, "x") for k in range(2)]
    return Group(Prompt(id_, id_, (3, 4, 5), "p"), tuple(Rollout(each, Reward(float(each.member))) for each in done))


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], Config]:
    """A config, and a folder of that name in which a generation job has left two batches."""
    model = tiny_folder(tmp_path)

    def make(name: str) -> Config:
        shared = Folder(tmp_path / name)
        shared.make()
        for step in range(STEPS):
            for id_ in (2 * step, 2 * step + 1):
                shared.write_group(group(id_, step))
            shared.write_batch(step, (2 * step, 2 * step + 1))
        changes = {
            "model.path": str(model),
            "run.steps": STEPS,
            "place.placement": "separate",
            "exchange.folder": str(shared.path),
        }
        return config(tmp_path / "run", **changes, train__lr=1e-2, place__threads=1, checkpoint__keep=1)

    return make
