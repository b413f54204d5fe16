"""Two real jobs on a tiny task: together they do what one job does, also when each is killed on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollyard.exchange.folder import Folder
from rollyard.journal.reader import JournalReader
from tests.small import BASE

STEPS = 6


class Jobs:
    """Starts either of them, with the same options."""

    def __init__(self, tmp_path: Path) -> None:
        self.shared = Folder(tmp_path / "shared")
        self.out = tmp_path / "run"
        self._logs = tmp_path
        self._started: list[subprocess.Popen[bytes]] = []
        options = {
            "run.out": self.out,
            "run.steps": STEPS,
            "place.placement": "separate",
            "place.threads": 1,
            "rollout.group_size": 4,
            "rollout.groups_per_step": 4,
            "rollout.max_tokens": 12,
            "prompts.held_out": 4,
            "reward.function": "tests.rewards:share_of_a",
            "engine.kernels": "plain",
            "train.lr": 1e-2,
            "train.warmup_steps": 0,
            "exchange.folder": self.shared.path,
            "watch.view": "plain",
            **{f"warmup.{name}": value for name, value in BASE.items()},
        }
        self._options = [f"--{name}={value}" for name, value in options.items()]

    def start(self, kind: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "rollyard.cli", kind, "--preset", "sort", *self._options]
        with (self._logs / f"{kind}-{len(self._started)}.log").open("wb") as log:
            self._started.append(subprocess.Popen(command, stdout=log, stderr=log, env=os.environ))
        return self._started[-1]

    def kill(self, job: subprocess.Popen[bytes]) -> None:
        job.send_signal(signal.SIGKILL)
        job.wait(10)

    def until(self, holds: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 150
        while not holds():
            assert time.monotonic() < end, f"{what} is not there: {self.said()}"
            time.sleep(0.01)

    def newest(self) -> int:
        weights = self.shared.path / "weights"
        return -1 if not weights.is_dir() or (found := self.shared.newest()) is None else found

    def said(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in sorted(self._logs.glob("*.log")))

    def ended(self, *jobs: subprocess.Popen[bytes]) -> None:
        for job in jobs:
            assert job.wait(150) == 0, self.said()

    def losses(self) -> list[tuple[int, float, float]]:
        records = [json.loads(line) for line in (self.out / "metrics.jsonl").read_text().splitlines()]
        return [(record["step"], record["train/loss"], record["reward_mean"]) for record in records]

    def close(self) -> None:
        for job in self._started:
            if job.poll() is None:
                self.kill(job)


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    made: list[Jobs] = []

    def make(name: str) -> Jobs:
        (tmp_path / name).mkdir()
        made.append(Jobs(tmp_path / name))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_each_killed_once_and_the_same_comes_out(jobs: Callable[[str], Jobs]) -> None:
    whole = jobs("whole")
    training = whole.start("train")
    whole.ended(whole.start("run"), training)
    cut = jobs("cut")
    generation = cut.start("run")  # in another order
    training = cut.start("train")
    cut.until(lambda: cut.newest() >= 2, "version 2")
    cut.kill(training)
    training = cut.start("train")
    cut.until(lambda: cut.newest() >= 4, "version 4")
    cut.kill(generation)
    generation = cut.start("run")
    cut.ended(generation, training)
    assert cut.shared.batches() == whole.shared.batches()
    assert [len(ids) for ids in cut.shared.batches().values()] == [4] * STEPS
    expected = whole.losses()
    assert [step for step, _, _ in expected] == list(range(1, STEPS + 1))
    missing = set(expected) - set(cut.losses())  # a step that was trained while nobody was there to hear of it
    assert set(cut.losses()) <= set(expected) and len(missing) <= 1
    assert [cut.shared.stats(step).loss for step, _, _ in expected] == [loss for _, loss, _ in expected], "that stays in stats/"
    for name in ("model.safetensors", "trainer.safetensors"):
        left, right = (load_file(each.shared.weights(STEPS) / name) for each in (cut, whole))
        assert left.keys() == right.keys()
        # Torch's random state is that of processes of which one made the base policy; nothing is drawn from it.
        assert all(torch.equal(left[key], right[key]) for key in left if not key.startswith("random/"))
    report = json.loads((cut.out / "report.json").read_text())
    assert report["finished"] == {"cause": "all steps are done", "failed": False}
    assert report["weights"]["canary"]["unseen"] == [] and report["weights"]["probes"].get("contradicted", 0) == 0
    with JournalReader(cut.out / "journal.sqlite") as journal:
        assert journal.incarnation.incarnation == 1 and max(journal.batches()) == STEPS - 1
