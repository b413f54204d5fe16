"""A run on a real model: vLLM generates, Rollyard trains, weights travel, canary and probe look after them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.vllm.driving import root

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]
MODEL = Path(root()) / "models" / "smollm2-135m"


def test_grpo_on_smollm2(tmp_path: Path) -> None:
    """Temperature and top_p of the classic configuration, with its 256 slots."""
    assert (MODEL / "config.json").is_file(), "make model fetches it"
    options = {
        "model": MODEL,
        "prompts": "examples/arithmetic.jsonl",
        "reward": "examples/reward.py:exact_number",
        "out": tmp_path / "run",
        "run.steps": 2,
        "rollout.groups_per_step": 2,
        "rollout.group_size": 4,
        "rollout.max_tokens": 16,
        "rollout.temperature": 0.8,
        "rollout.top_p": 0.95,
        "train.lr": 1e-5,
        "batch.token_budget": 2048,
        "engine.window": 256,
        "engine.slots": 256,
        "engine.kind": "vllm",
        "place.placement": "separate",
        "place.device": "cpu",
        "view": "plain",
    }
    given = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, "-m", "rollyard.cli", "run", *given]
    done = subprocess.run(command, cwd=root(), capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report: dict[str, Any] = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["steps"] == 2 and report["admitted"] == report["trained"] + sum(report["dropped"].values())
    canary, probes = report["weights"]["canary"], report["weights"]["probes"]
    assert canary["gap"] <= canary["limit"] and "contradicted" not in probes and sum(probes.values()) > 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(step["train/logprob_gap_mean"] < 1e-4 for step in steps)
