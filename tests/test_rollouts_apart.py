"""`Rollouts` with engines in processes of their own: what goes on while the caller trains, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import rollyard
from rollyard.errors import RunFailed
from rollyard.watch.read import read_report
from tests.rewards import share_of_a
from tests.small import ENGINE, children
from tests.test_rollouts import BATCH, given, moved
from tests.tiny import tiny_folder

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def until(what: str, reached: object, seconds: float = 30.0) -> None:
    assert callable(reached)
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.mark.parametrize(("placement", "staleness"), [("async", 2), ("separate", 0)])
def test_generation_goes_on_as_far_as_it_may_while_the_caller_trains(
    model_folder: Path, tmp_path: Path, placement: str, staleness: int
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    options = {"place.placement": placement, "rollout.max_staleness": staleness, "run.steps": 4}
    with rollyard.Rollouts.sync(given(model_folder, tmp_path / "run", **options), reward=share_of_a) as rollouts:
        rollouts.submit(["ab"] * 6 * BATCH)
        oldest = []
        for batch in rollouts.batches():
            ahead = min(1 + batch.step + staleness, 4) * BATCH  # prompts that the rule lets in before this is trained
            until("prompts are let in", lambda wanted=ahead: rollouts.status().admitted >= wanted)
            written = [span.version.step for group in batch.groups for each in group.rollouts for span in each.completion.spans]
            oldest.append(batch.step - min(written))
            assert rollouts.status().admitted == ahead
            rollouts.publish(moved(model))
    report = rollouts.report
    assert report is not None and not report.finished.failed
    assert max(oldest) == staleness, "some of it was written while older weights were trained"
    assert report.weights.canary is not None and report.prompts.trained == 4 * BATCH


def test_a_run_that_fails_tells_who_trains_and_who_waits(model_folder: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    config = given(model_folder, tmp_path / "run", place__placement="async", place__restarts=0, run__steps=50)
    with pytest.raises(RunFailed, match="no engine is left"), rollyard.Rollouts.sync(config, reward=share_of_a) as rollouts:
        rollouts.submit(["ab"] * 2 * BATCH)
        for batch in rollouts.batches():
            if batch.step == 1:
                (engine,) = children(ENGINE)
                os.kill(engine, signal.SIGKILL)
            rollouts.publish(moved(model))
    assert rollouts.report is not None and rollouts.report.finished.failed
    assert rollouts.status().state == "failed" and "no engine is left" in rollouts.status().cause


SCRIPT = """
import signal, sys, time
import rollyard
from tests.test_rollouts import given
from tests.rewards import share_of_a
from pathlib import Path
from transformers import AutoModelForCausalLM

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
model, out = map(Path, sys.argv[1:])
config = given(model, out, place__placement="async", run__steps=1000)
with rollyard.Rollouts.sync(config, reward=share_of_a) as rollouts:
    policy = AutoModelForCausalLM.from_pretrained(model)
    for batch in rollouts.batches() if rollouts.submit(["ab"] * 1000) else ():
        if batch.step == 2:
            print("training", flush=True)
            time.sleep(60)
        rollouts.publish(policy)
"""


def test_ctrl_c_leaves_the_block_and_no_process_behind(model_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, model_folder, tmp_path / "run"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as caller:
        assert caller.stdout is not None and caller.stdout.readline() == "training\n"
        caller.send_signal(signal.SIGINT)
        assert caller.wait(30) != 0
    report = read_report(tmp_path / "run" / "report.json")
    assert not report.finished.failed and report.finished.cause == "left by the caller: KeyboardInterrupt"
    assert report.prompts.trained == 2 * BATCH
