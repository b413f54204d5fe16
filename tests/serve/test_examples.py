"""The examples of a trainer elsewhere and of an agent, against a real service."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.process import TOKEN, serving
from tests.sources import ROOT
from tests.tiny import tiny_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def example(name: str, *arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ROLLYARD_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def test_an_agent_plays_and_a_trainer_elsewhere_learns_from_that(tmp_path: Path) -> None:
    options = {
        "model.path": tiny_folder(tmp_path, chat=True),
        "prompts.path": ROOT / "examples" / "arithmetic.jsonl",
        "run.out": tmp_path / "run",
        "run.steps": 2,
        "rollout.group_size": 2,
        "rollout.groups_per_step": 3,
        "rollout.max_tokens": 6,
        "environment.limit_s": 600,
        "engine.kernels": "plain",
        "serve.port": 0,
        "serve.episodes": True,
        "watch.view": "plain",
    }
    with serving(*(f"--{name}={value}" for name, value in options.items())) as process:
        agent, trainer = example("agent.py", process.url, "4"), example("remote_trainer.py", process.url)
        learnt = trainer.communicate(timeout=120)[0]
        *steps, end = learnt.splitlines()
        assert [re.match(r"step \d", line)[0] for line in steps] == ["step 1", "step 2"], learnt  # type: ignore[index]
        assert re.fullmatch(r"all steps are done: 6 prompts trained, \d+ tokens written", end), learnt
        played = agent.communicate(timeout=60)[0]
        assert re.fullmatch(r"12 episodes\n", played), played
        assert process.end(signal.SIGTERM) == 0, process.said
