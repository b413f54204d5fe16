"""Whole runs that generate with a server: by the config alone, and refused where the server cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rollyard
from rollyard.config import Config
from rollyard.environment import engine_keys
from rollyard.errors import ConfigError
from tests.engine.sglang_double import double
from tests.engine.sglang_parts import NEW, OLD
from tests.rewards import share_of_answer
from tests.tiny import tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def config(tmp_path: Path, folder: Path, **changes: Any) -> Config:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{chr(97 + i)}bc=", "answer": chr(97 + i)}) + "\n" for i in range(12)))
    values = {
        "run.out": str(tmp_path / "run"),
        "run.steps": 3,
        "model.path": str(folder),
        "prompts.path": str(prompts),
        "rollout.group_size": 4,
        "rollout.groups_per_step": 2,
        "rollout.max_tokens": 6,
        "train.lr": 1e-2,
        "engine.kind": "sglang",
        "engine.window": 128,
        "engine.url": "http://127.0.0.1:1",
        "place.placement": "separate",
    }
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return rollyard.resolve(environment={}, overrides=values | changes).config


@pytest.mark.parametrize(
    ("version", "incremental", "rollover"), [(NEW, True, "drain"), (OLD, False, "abort"), (NEW, False, "keep")]
)
async def test_a_run_on_two_servers(tmp_path: Path, folder: Path, version: str, incremental: bool, rollover: str) -> None:
    """Each version reaches both; the canary and the probe of each load pass, and engine and trainer agree."""
    options = {"version": version, "incremental": incremental, "deterministic": True}
    async with double(folder, **options) as one, double(folder, **options) as two:
        chosen = config(tmp_path, folder, engine__url=f"{one.url},{two.url}", place__generate=2, weights__rollover=rollover)
        run = rollyard.Run(chosen, reward=share_of_answer)
        steps = [step async for step in run]
        assert [step.step for step in steps] == [1, 2, 3]
        for step in steps:
            spans = {span[:2] for group in step.groups for rollout in group.rollouts for span in rollout.completion.spans}
            assert spans == {((step.step - 1, 0), (step.step - 1, 0))}
            assert step.train.logprob_gap_max < 1e-4
        for server in (one, two):
            assert any(path == "/generate" for path, _ in server.asked)
            assert "0.-1" in server.labels and server.label == "3.0"  # the canary's weights, and the last
    report = json.loads((run.folder.path / "report.json").read_text())
    assert report["engine"] == "sglang" and report["weights"]["transport"] == "checkpoint"
    assert not (run.folder.path / "weights").exists()


@pytest.mark.parametrize(
    ("changes", "where", "problem"),
    [
        ({"rollout.top_p": 0.9}, "rollout.top_p", "logprobs from before top_p"),
        ({"rollout.top_k": 20}, "rollout.top_k", "logprobs from before top_p"),
        ({"weights.transport": "shared_memory"}, "weights.transport", "takes no weights by shared_memory.*auto, checkpoint"),
        ({"weights.transport": "broadcast"}, "weights.transport", "takes no weights by broadcast"),
        ({"engine.url": ""}, "engine.url", "1 engines need as many running servers, and 0 are named"),
        ({"place.generate": 2}, "engine.url", "2 engines need as many running servers, and 1 are named"),
        ({"engine.url": "localhost:30000"}, "engine.url", "no address"),
        ({"place.placement": "colocated"}, "engine.kind", "memory of its own"),
    ],
)
def test_what_sglang_cannot_is_refused_before_anything_starts(
    tmp_path: Path, folder: Path, changes: dict[str, Any], where: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        rollyard.Run(config(tmp_path, folder, **changes), reward=share_of_answer)
    assert where in caught.value.where


async def test_a_server_with_a_key(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with double(folder, key="secret") as server:
        run = rollyard.Run(config(tmp_path, folder, engine__url=server.url, run__steps=1), reward=share_of_answer)
        with pytest.raises(ConfigError, match="ROLLYARD_ENGINE_KEY"):
            [step async for step in run]
        monkeypatch.setenv("ROLLYARD_ENGINE_KEY", "secret")
        chosen = config(tmp_path, folder, engine__url=server.url, run__steps=1, run__overwrite=True)
        run = rollyard.Run(chosen, reward=share_of_answer)
        assert len([step async for step in run]) == 1


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_keys() == ("", "")
    monkeypatch.setenv("ROLLYARD_ENGINE_KEY", "a")
    assert engine_keys() == ("a", "a")
    monkeypatch.setenv("ROLLYARD_ENGINE_ADMIN_KEY", "b")
    assert engine_keys() == ("a", "b")
