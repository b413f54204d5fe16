"""Keys and passwords of a real run: they reach the servers that they are for, and nothing that the run writes or shows."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import rollyard
from rollyard import environment
from rollyard.errors import ConfigError, RollyardError
from rollyard.layers import options
from tests.engine.sglang_double import double
from tests.tiny import tiny_folder

KEYS = {name: f"planted-{number}-{name.lower()}" for number, name in enumerate(environment.KEYS)}
SECRETS = [*KEYS.values(), "planted-token"]


def kept(folder: Path) -> dict[str, bytes]:
    """All that lies below, by its name. The journal may still have a second file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def shows(prompt: str, completion: str, answer: str) -> float:
    """What a user's code sees, and prints, are its own secrets: here it prints that it has one."""
    sys.stdout.write(f"judged {'ROLLYARD_REWARD_KEY' in os.environ}\n")
    return float(completion.count(answer))


def values(tmp_path: Path, folder: Path) -> dict[str, object]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{chr(97 + i)}bc=", "answer": chr(97 + i)}) + "\n" for i in range(6)))
    return {
        "run.out": str(tmp_path / "run"),
        "run.steps": 2,
        "model.path": str(folder),
        "prompts.path": str(prompts),
        "rollout.group_size": 2,
        "rollout.groups_per_step": 2,
        "rollout.max_tokens": 4,
        "engine.kind": "sglang",
        "engine.window": 128,
        "place.placement": "separate",
    }


@pytest.mark.slow
async def test_no_file_of_a_run_has_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of two runs: one goes well, the other has a key that the server refuses, and repeats."""
    for name, value in {**KEYS, "RAY_AUTH_TOKEN": "planted-token"}.items():
        monkeypatch.setenv(name, value)
    folder = tiny_folder(tmp_path)
    keys = {"key": KEYS["ROLLYARD_ENGINE_KEY"], "admin_key": KEYS["ROLLYARD_ENGINE_ADMIN_KEY"]}
    async with double(folder, deterministic=True, **keys) as server:
        config = rollyard.resolve(environment={}, overrides=values(tmp_path, folder) | {"engine.url": server.url}).config
        run = rollyard.Run(config, reward=shows)
        assert len([step async for step in run]) == 2
        assert any(path == "/generate" for path, _ in server.asked)
        monkeypatch.setenv("ROLLYARD_ENGINE_KEY", "planted-token")
        again = config.model_copy(update={"run": config.run.model_copy(update={"out": str(tmp_path / "refused")})})
        with pytest.raises(RollyardError) as caught:
            [step async for step in rollyard.Run(again, reward=shows)]
    files = kept(tmp_path / "run") | {f"refused/{name}": content for name, content in kept(tmp_path / "refused").items()}
    assert {"config.toml", "metrics.jsonl", "journal.sqlite", "report.json", "trace.json", "reward.log"} <= files.keys()
    assert b"judged True" in files["reward.log"]
    shown = capfd.readouterr()
    files |= {"out": shown.out.encode(), "err": shown.err.encode(), "error": str(caught.value).encode()}
    assert [(name, secret) for name, content in files.items() for secret in SECRETS if secret.encode() in content] == []


ADDRESSES = {
    "engine.url": {"engine.kind": "sglang", "place.placement": "separate"},
    "reward.judge.url": {"reward.judge.model": "m"},
    "reward.remote.url": {},
    "place.ray_address": {"place.runtime": "ray", "place.device": "cpu"},
}


@pytest.mark.parametrize("where", ADDRESSES)
@pytest.mark.parametrize(
    "url", ["http://me:planted-token@h:1/v1", "https://planted-token@h", "http://h/?key=planted-token", "http://h#planted-token"]
)
def test_an_address_with_more_than_a_place_is_refused_and_not_shown(where: str, url: str) -> None:
    """It would be kept in config.toml and in the journal, and shown in messages."""
    with pytest.raises(ConfigError, match="no user, no password and no query") as caught:
        rollyard.resolve(preset="sort", environment={}, overrides={where: url, **ADDRESSES[where]})
    assert caught.value.where == where and "planted-token" not in str(caught.value)
    assert ("RAY_AUTH_TOKEN" if where == "place.ray_address" else "_KEY") in caught.value.remedy


def test_every_option_that_is_an_address_is_checked() -> None:
    assert {option.name for option in options() if option.name.endswith(("url", "ray_address"))} == set(ADDRESSES)


def test_no_option_takes_a_key() -> None:
    """They come by variables, which nothing keeps."""
    odd = ("key", "token", "password", "secret")
    assert [option.name for option in options() if option.name.rpartition(".")[2].strip("s") in odd] == []


def test_processes_on_other_machines_get_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    given = environment.carried({**os.environ, "ROLLYARD_CACHE": "/x", **dict.fromkeys(KEYS, "another")})
    assert "ROLLYARD_CACHE" in given and not given.keys() & KEYS.keys()
