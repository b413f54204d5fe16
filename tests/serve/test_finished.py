"""A service that is started again once its run has done all its steps: readers that were behind get what they lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
from transformers import AutoModelForCausalLM

from rollyard.layers import resolve_tree
from rollyard.rollouts import Rollouts
from rollyard.serve.app import application
from rollyard.serve.client import AsyncClient
from rollyard.serve.service import Service
from rollyard.serve.settings import ServeConfig, check
from rollyard.types import Group
from tests.serve.double import URL
from tests.tiny import tiny_folder


def config(model: Path, out: Path) -> ServeConfig:
    values: dict[str, Any] = {
        "model.path": str(model),
        "prompts.source": "given",
        "run.out": str(out),
        "run.steps": 1,
        "rollout.group_size": 2,
        "rollout.groups_per_step": 2,
        "rollout.max_tokens": 4,
        "reward.function": "unjudged",
        "engine.slots": 4,
        "engine.kernels": "plain",
        "watch.view": "quiet",
    }
    return resolve_tree(ServeConfig, check, environment={}, overrides=values).config


async def test_what_became_of_prompts_is_served_once_the_run_is_over(tmp_path: Path) -> None:
    model = tiny_folder(tmp_path)
    made = config(model, tmp_path / "run")
    async with (
        Rollouts(made.run_config) as rollouts,
        Service(made, rollouts) as service,
        AsyncClient(URL, transport=httpx.ASGITransport(application(service, ""))) as client,
    ):
        assert await client.submit(["ab", "cd"]) == (0, 1)
        async with await client.trainer("mine") as trainer:
            async for _ in trainer.batches():
                await trainer.publish(AutoModelForCausalLM.from_pretrained(model))
    async with Rollouts.resume(made.run.out) as rollouts:
        assert "has all its 1 steps" in rollouts.finished and rollouts.version.step == 1
        AutoModelForCausalLM.from_pretrained(rollouts.model)
        async with Service(made, rollouts) as service:
            app = httpx.ASGITransport(application(service, ""))
            async with AsyncClient(URL, transport=app) as client, httpx.AsyncClient(transport=app, base_url=URL) as http:
                status = await client.status()
                assert (status["state"], status["version"]) == ("finished", 1) and status["model"].endswith("step-000001")
                found = []
                async for _, each in client.outcomes():
                    found.append(each)
                    if len(found) == 2:
                        break
                assert [each.id for each in found if isinstance(each, Group)] == [0, 1]
                assert (await http.post("/v1/prompts", json={"prompts": [{"text": "ab"}]})).status_code == 422
                lines = (await http.get("/v1/groups/stream")).text.splitlines()
                assert len(lines) == 2, "a stream ends when there is nothing more to come"
                assert (await http.get("/metrics")).status_code == 200
                assert [batch async for batch in (await client.trainer("mine")).batches()] == []
