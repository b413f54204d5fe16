"""Real runs, in processes of their own, that are killed at any moment and resumed."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollyard.journal.reader import JournalReader
from rollyard.watch.kept import read_kept
from rollyard.watch.read import read_report
from rollyard.watch.report import Report
from tests.small import BASE

STEPS, BATCH = 6, 4
OPTIONS = {
    **{f"warmup.{name}": value for name, value in BASE.items()},
    "run.steps": STEPS,
    "rollout.group_size": 2,
    "rollout.groups_per_step": BATCH,
    "engine.kernels": "plain",
    "checkpoint.every": 2,
    "prompts.held_out": 4,
    "reward.function": "judge.py:share_of_a",
    "train.lr": 1e-2,
    "watch.view": "plain",
}
JUDGE = "def share_of_a(prompt, completion, **columns):\n    return completion.count('a') / max(len(completion), 1)\n"


class Runs:
    """Runs of one folder, by the command line."""

    def __init__(self, path: Path, options: Sequence[str]) -> None:
        self.path, self._options = path, options
        (path / "judge.py").write_text(JUDGE)

    def begin(self, name: str) -> subprocess.Popen[str]:
        options = [f"--{option}={value}" for option, value in OPTIONS.items()]
        return self._start("run", "--preset", "sort", "--run.out", name, *options, *self._options)

    def resume(self, name: str) -> subprocess.Popen[str]:
        return self._start("resume", name)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "ROLLYARD_CACHE": str(self.path / "cache"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "rollyard", *arguments]
        return subprocess.Popen(
            command, cwd=self.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def rows(self, name: str) -> list[int]:
        """Steps in its metrics."""
        file = self.path / name / "metrics.jsonl"
        return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []

    def weights(self, name: str) -> dict[str, torch.Tensor]:
        (newest,) = (self.path / name / "checkpoints").glob(f"step-{STEPS:06d}*")
        return load_file(newest / "model.safetensors")

    def report(self, name: str) -> Report:
        return read_report(self.path / name / "report.json")


def ended(process: subprocess.Popen[str]) -> str:
    """What it said, once it has ended well."""
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    return said


def told(runs: Runs, life: int) -> bool:
    """Is anything kept of what this life did? Metrics of the life before do not say that it has begun."""
    kept = read_kept(runs.path / "run" / "timeline.json")
    return kept is not None and len(kept.lives) == life


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Runs:
    """A run that nothing happens to."""
    runs = Runs(tmp_path_factory.mktemp("whole"), [])
    ended(runs.begin("run"))
    return runs


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("placement", ["colocated", "async"])
def test_killed_at_any_moment_it_ends_with_the_weights_of_a_run_that_was_not(tmp_path, whole, placement):
    """With placement async and nothing stale, which is the same run."""
    runs, moments = Runs(tmp_path, [f"--place.placement={placement}"]), random.Random(placement)
    process = runs.begin("run")
    for life in range(2):
        while not (len(runs.rows("run")) > 2 * life and told(runs, life)) and process.poll() is None:
            time.sleep(0.03)
        time.sleep(moments.uniform(0, 0.2))
        process.kill()
        process.communicate()
        kept = read_kept(tmp_path / "run" / "timeline.json")
        assert kept is not None and not kept.whole and len(kept.lives) == life, "what it did until then is told"
        assert {lane.device for lane in kept.lanes} > {"driver"}
        process = runs.resume("run")
    ended(process)
    kept = read_kept(tmp_path / "run" / "timeline.json")
    assert kept is not None and kept.whole and len(kept.lives) == 2 and kept.marks[-1].step == STEPS and kept.slots
    for name, tensor in whole.weights("run").items():
        torch.testing.assert_close(runs.weights("run")[name], tensor, rtol=0, atol=1e-6)  # a bit of the last place of a logprob
    assert runs.rows("run") == whole.rows("run") == list(range(1, STEPS + 1))
    report, plain = runs.report("run"), whole.report("run")
    assert report.reward.curve == pytest.approx(plain.reward.curve) and report.eval.last == pytest.approx(plain.eval.last)
    assert (report.steps, report.eval.samples, report.prompts) == (plain.steps, plain.eval.samples, plain.prompts)
    assert (report.members, report.staleness) == (plain.members, plain.staleness)
    assert report.lives.count > 1 and not report.finished.failed
    with JournalReader(tmp_path / "run" / "journal.sqlite") as journal:
        trained = list(journal.query("SELECT group_id, trained_step FROM lineage WHERE trained_step IS NOT NULL ORDER BY 1"))
    assert [step for _, step in trained] == [step for step in range(STEPS) for _ in range(BATCH)]
