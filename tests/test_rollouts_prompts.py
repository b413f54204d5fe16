"""Who submits prompts to `Rollouts`, and when."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import rollyard
from rollyard.errors import ConfigError
from tests.rewards import share_of_a
from tests.test_rollouts import BATCH, given
from tests.tiny import tiny_folder


async def test_prompts_are_taken_where_they_are_given_and_the_run_goes_on(tmp_path: Path) -> None:
    model_folder = tiny_folder(tmp_path / "model")
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "ab"}\n' * BATCH)
    config = given(model_folder, tmp_path / "run", prompts__source="auto", prompts__path=str(file))
    rollouts = rollyard.Rollouts(config, reward=share_of_a)
    with pytest.raises(ConfigError, match="the run has not begun") as error:
        await rollouts.submit(["ab"])
    assert error.value.remedy == "enter the block first"
    async with rollouts:
        for submits in (lambda: rollouts.submit(["ab"]), lambda: asyncio.to_thread(rollouts.end_of_prompts)):
            with pytest.raises(ConfigError, match="prompts come from a file or a task") as error:
                await submits()
            assert "prompts.source" in error.value.remedy and "block" not in error.value.remedy
        rollouts.stop("seen enough")
