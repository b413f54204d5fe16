"""Whole runs with a value head: advantages token by token."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollyard
from rollyard.watch.report import Report
from tests import small

GAE = {"advantage.kind": "gae", "train.value_lr": 0.05, "train.warmup_steps": 0, "place.threads": 1}


def length(prompt: str, completion: str, **columns: object) -> float:
    """What a value head can learn from how far a completion has come."""
    return len(completion) / 10


def learnt(out: Path, **changes: object) -> tuple[list[tuple[float, float, float]], Report]:
    run = rollyard.Run(small.config(out, **(GAE | changes)), reward=length)
    curve = [(step.train.loss, step.train.grad_norm, step.train.value_loss) for step in run]
    return curve, run.report


def test_a_value_head_learns_what_to_expect(tmp_path):
    """One completion of each prompt: nothing but the value head says how good it is."""
    one = {
        "rollout.group_size": 1,
        "rollout.min_scored": 1,
        "rollout.groups_per_step": 16,
        "rollout.max_tokens": 8,
        "run.steps": 8,
        "train.lr": 1e-5,
    }
    curve, report = learnt(tmp_path / "run", **one)
    losses = [value_loss for _, _, value_loss in curve]
    assert max(losses[1:]) < 0.5 * losses[0] and all(norm > 0 for _, norm, _ in curve)
    assert report.members.trained == 16 * 8 and not report.finished.failed


@pytest.mark.slow
def test_ranks_in_processes_of_their_own_change_nothing(tmp_path):
    """Two trainers with a copy each, behind a line, against one in this process: the same but for rounding."""
    alone, _ = learnt(tmp_path / "alone")
    together, report = learnt(tmp_path / "together", **{"place.placement": "separate", "place.train": 2})
    assert len(alone) == 4 and not report.finished.failed
    for one, other in zip(alone, together, strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=1e-5)


def test_a_batch_without_a_token_leaves_the_value_head_alone(tmp_path):
    cut = {"rollout.ignore_eos": True, "rollout.max_tokens": 4, "advantage.overlong": "mask", "run.steps": 2}
    curve, report = learnt(tmp_path / "run", **cut)
    assert curve == [(0.0, 0.0, 0.0)] * 2 and report.members.trained == 0
    assert not report.finished.failed
