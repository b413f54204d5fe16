"""Whole small runs in which much goes wrong: what steps, completions and the report say of it must be the same thing."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest

import rollyard
from rollyard.config import Config
from rollyard.types import Completion, FinishReason
from rollyard.watch.report import Report
from rollyard.watch.step import Step
from tests.tiny import CHARACTERS, SPECIAL, tiny_folder


def options(choose: random.Random, folder: Path, prompts: Path, out: Path) -> dict[str, object]:
    chosen: dict[str, list[object]] = {
        "rollout.group_size": [2, 3, 4],
        "rollout.groups_per_step": [2, 3],
        "rollout.max_tokens": [1, 2, 6],
        "rollout.min_scored": [1, 2],
        "rollout.stop": [[], ["a"], ["ab", "c"]],
        "rollout.filter": ["none", "flat"],
        "rollout.temperature": [1.0, 0.7],
        "rollout.top_k": [0, 5],
        "prompts.epochs": [0, 1, 2],
        "advantage.kind": ["grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline"],
        "advantage.overlong": ["keep", "mask"],
        "train.minibatches": [1, 2],
        "train.loss": ["ppo", "gspo", "cispo"],
        "train.aggregation": ["token", "sequence", "fixed"],
        "train.correction": ["none", "truncate", "mask"],
        "batch.token_budget": [16, 8192],
    }
    found = {name: choose.choice(values) for name, values in chosen.items()}
    if found["rollout.filter"] == "flat":
        found["rollout.refills"] = choose.choice([1, 3])
    fixed = {
        "run.out": str(out),
        "run.steps": 4,
        "model.path": str(folder),
        "prompts.path": str(prompts),
        "prompts.held_out": 2,
        "rollout.give_up_after": 1000,
        "train.lr": 1e-3,
        "engine.slots": 3,
        "engine.window": 16,
        "engine.kernels": "plain",
    }
    return found | fixed


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*prompts with equal rewards were dropped:RuntimeWarning")
@pytest.mark.parametrize("seed", [0, 7, 14, 18])
def test_all_books_agree(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    choose, calls = random.Random(seed), itertools.count()
    prompts = tmp_path / "prompts.jsonl"  # some of them the same
    prompts.write_text("".join(json.dumps({"prompt": f"{chr(97 + i % 6)}bc="}) + "\n" for i in range(14)))
    changes = options(choose, tiny_folder(tmp_path), prompts, tmp_path / "run")
    config = rollyard.resolve(environment={}, overrides=changes).config

    def moody(prompt: str, completion: str) -> float:
        if next(calls) % 6 == 5:
            raise ValueError("no number in it")
        return choose.choice([math.nan, 0.0, 0.0, 1.0])

    def short(prompt: str, completion: str) -> float | None:
        return None if len(completion) == 3 else -len(completion) / 6

    run = rollyard.Run(config, reward={"moody": moody, "short": short})
    trained = [check(step, config) for step in run]
    assert run.report is not None and trained
    balanced(run.report, sum(trained))


def check(step: Step, config: Config) -> int:
    """Trained tokens of the step, if all that is said of it is true."""
    members = [rollout for group in step.groups for rollout in group.rollouts]
    scored = [each for each in members if each.reward.value is not None and math.isfinite(each.reward.value)]
    masked = config.advantage.overlong == "mask"
    learnt = [each.completion for each in scored if not (masked and each.completion.finish.truncated)]
    tokens, metrics = sum(len(done.token_ids) for done in learnt), step.to_metrics()
    assert step.train.tokens == tokens and metrics["unscored"] == len(members) - len(scored)
    assert step.train.stale_gap_max is None and (step.train.fresh_gap_max or 0.0) < 1e-4
    if config.train.minibatches == 1:
        assert step.train.ratio_mean == pytest.approx(1.0, abs=1e-4)
    for each in members:
        ends_as_it_says(each.completion, config.rollout.stop, config.rollout.max_tokens)
    return tokens


def ends_as_it_says(done: Completion, stop: tuple[str, ...], most: int) -> None:
    text = "".join(CHARACTERS[token - len(SPECIAL)] for token in done.token_ids if token >= len(SPECIAL))
    stopped = done.token_ids[-1] == 1 or any(each in text for each in stop)
    assert (done.finish is FinishReason.STOP) == stopped and 1 <= len(done.token_ids) <= most
    assert done.finish is FinishReason.STOP or len(done.token_ids) == most
    assert text.startswith(done.text) and not any(each in done.text for each in stop)


def balanced(report: Report, trained: int) -> None:
    for counts in (report.prompts, report.members):
        assert counts.admitted == counts.trained + sum(counts.dropped.values())
    tokens = report.tokens
    assert tokens.generated == tokens.trained + sum(tokens.dropped.values()) == report.generation_tokens
    assert tokens.trained == trained == sum(report.staleness.values())
