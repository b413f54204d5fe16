"""Environments of the package verifiers, which has an environment of its own: `make test-verifiers`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rollyard
from rollyard.errors import ConfigError
from rollyard.journal.reader import JournalReader
from tests import small
from tests.tiny import tiny_folder

pytestmark = [pytest.mark.verifiers, pytest.mark.timeout(300)]  # the package alone takes many seconds to import

LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}
PLUGINS = str(Path(__file__).parent / "plugins")


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The task set, by this process and by those that play."""
    monkeypatch.syspath_prepend(PLUGINS)
    monkeypatch.setenv("PYTHONPATH", f"{PLUGINS}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(tmp_path: Path, task: str = "verifiers/rollyard-letters", **options: object) -> rollyard.Config:
    given: dict[str, object] = {
        "prompts.task": task,
        "prompts.options": json.dumps(LOCAL | {key: value for key, value in options.items() if key == "taskset"}),
        "prompts.held_out": 2,
        "environment.name": "verifiers",
        "environment.limit_s": 60,
        "model.path": str(tiny_folder(tmp_path, chat=True)),
        "rollout.max_tokens": 8,
        "rollout.groups_per_step": 2,
        "run.steps": 2,
    }
    return small.config(tmp_path / "run", **given | {key: value for key, value in options.items() if key != "taskset"})


def test_a_run_on_an_environment_of_verifiers(tmp_path: Path) -> None:
    """Its task judges; what is trained on are the very tokens that were sampled, turn after turn in one row."""
    run = rollyard.Run(config(tmp_path))
    steps = list(run)
    assert len(steps) == 2 and run.report is not None and not run.report.finished.failed
    for step in steps:
        assert step.train.logprob_gap_max < 1e-4, "the trainer finds the logprobs that the engine had: tokens are exact"
        for group in step.groups:
            (letter, _) = group.prompt.text.rpartition("user: ")[2].split()
            for rollout in group.rollouts:
                done, reward = rollout.completion, rollout.reward
                first, second = done.turns
                before = (*first.prompt_ids, *done.token_ids[: first.tokens])
                assert second.prompt_ids[: len(before)] == before, "what was sampled stands there as it was"
                assert first.prompt_ids == group.prompt.token_ids and max(first.tokens, second.tokens) <= 5
                parts = reward.parts
                assert reward.value == pytest.approx(0.5 * parts["share"] + parts["even"]) and parts["turns"] == 2.0
                said = done.text.replace("user=more", "").replace("assistant=", "")
                assert 0 <= parts["share"] <= 1 and (parts["share"] > 0) == (letter in said.replace("user=", ""))
    assert run.report.eval.samples == 4 and run.report.eval.unscored == 0, "two held-out tasks, first and last"
    rows = {step.groups[0].prompt.columns["task"]["taskset"] for step in steps}
    assert rows == {"rollyard-letters"}


@pytest.mark.parametrize(
    ("taskset", "problem"),
    [({"broken": True}, "the harness is broken"), ({"tools": True}, "the policy cannot be asked with tools")],
)
def test_what_fails_there_is_no_verdict(tmp_path: Path, taskset: dict[str, bool], problem: str) -> None:
    run = rollyard.Run(config(tmp_path, taskset=taskset, run__steps=1, prompts__held_out=0, rollout__give_up_after=2))
    with pytest.raises(rollyard.RunFailed):
        list(run)
    with JournalReader(run.folder.journal) as journal:
        told = {row[0] for row in journal.query("SELECT problem FROM verdicts")}
    assert told and all(problem in each for each in told)


def test_mistakes_are_told_before_anything_starts(tmp_path: Path) -> None:
    def refused(**options: object) -> ConfigError:
        with pytest.raises(ConfigError) as raised:
            rollyard.Run(config(tmp_path, **options))
        return raised.value

    assert "no-such-set" in refused(task="verifiers/no-such-set").problem
    assert "rent sandboxes" in refused(prompts__options="").problem
    assert "brokn" in refused(taskset={"brokn": True}).problem
    assert refused(environment__name="calculator").where == "environment.name"
