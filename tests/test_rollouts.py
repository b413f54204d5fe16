"""`Rollouts`: a run whose trainer is the code that calls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import rollyard
from rollyard.config import Config
from rollyard.errors import ConfigError
from rollyard.prompts.given import GivenPrompt
from tests.rewards import share_of_a
from tests.tiny import tiny_folder

SIZE, BATCH = 2, 3


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def given(model: Path, out: Path, **changes: object) -> Config:
    """Of a small run with submitted prompts."""
    values: dict[str, Any] = {
        "model.path": str(model),
        "prompts.source": "given",
        "run.out": str(out),
        "run.steps": 2,
        "rollout.group_size": SIZE,
        "rollout.groups_per_step": BATCH,
        "rollout.max_tokens": 6,
        "engine.slots": 8,
        "engine.kernels": "plain",
    }
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return rollyard.resolve(environment={}, overrides=values | named).config


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """As if it had been trained."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-3)
    return model


async def test_submitted_prompts_are_batched_in_order_and_what_is_published_writes_the_next(
    model_folder: Path, tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    prompts = ["ab", [{"role": "user", "content": "cd"}], GivenPrompt(token_ids=[3, 4, 5], columns={"answer": "x"})]
    texts = [each for each in prompts if not isinstance(each, list)]  # the model has no chat template
    async with rollyard.Rollouts(given(model_folder, tmp_path / "run"), reward=share_of_a) as rollouts:
        assert await rollouts.submit([*texts, "ef"]) == (0, 1, 2)
        assert await rollouts.submit(["gh", "ij", "kl"]) == (3, 4, 5)
        seen = []
        async for batch in rollouts.batches():
            seen.append([group.id for group in batch.groups])
            for group in batch.groups:
                written = {span.version.step for rollout in group.rollouts for span in rollout.completion.spans}
                assert written == {batch.step} and len(group.rollouts) == SIZE
            assert {(sample.group, sample.member) for sample in batch.train.samples} == {
                (group.id, member) for group in batch.groups for member in range(SIZE)
            }
            version = await rollouts.publish(moved(model), {"loss": 0.25})
            assert version.step == batch.step + 1 == rollouts.status().version.step
    assert seen == [[0, 1, 2], [3, 4, 5]]
    assert rollouts.report is not None and not rollouts.report.finished.failed
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["train/loss"], row["train/grad_norm"], row["train/tokens"] > 0) for row in rows] == [(0.25, None, True)] * 2
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    stored = AutoModelForCausalLM.from_pretrained(checkpoint).state_dict()
    assert all(torch.equal(stored[name], tensor) for name, tensor in model.state_dict().items())


async def test_who_asks_for_a_batch_without_having_published_is_told_so(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing was published for it"), pytest.warns(RuntimeWarning, match="batch 0"):
        async with rollyard.Rollouts(given(model_folder, tmp_path / "run"), reward=share_of_a) as rollouts:
            await rollouts.submit(["ab", "cd", "ef"])
            async for _ in rollouts.batches():
                pass
    assert rollouts.report is not None and rollouts.report.finished.failed
    assert "nothing was published" in rollouts.report.finished.cause and rollouts.report.prompts.dropped == {"stopped": BATCH}
