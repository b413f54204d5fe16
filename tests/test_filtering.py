"""Whole runs, small and real, in which not everything that is written is trained on."""

from __future__ import annotations

import math
import warnings

import pytest

import rollyard
from rollyard.journal.reader import JournalReader
from rollyard.watch.read import read_report
from rollyard.watch.report import Filtering
from tests import small
from tests.rewards import share_of_a


def run_of(tmp_path, reward, **changes):
    run = rollyard.Run(
        small.config(tmp_path / "run", **({"run.steps": 2, "rollout.groups_per_step": 2} | changes)), reward=reward
    )
    return run, list(run)


def test_where_all_are_alike_the_bound_ends_the_search_and_is_told_once(tmp_path):
    """Every reward is 1: for each batch three prompts are asked in place of others, then two are trained as they are."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run, steps = run_of(
            tmp_path, lambda prompt, completion, **columns: 1.0, **{"rollout.filter": "flat", "rollout.refills": 3}
        )
    assert [str(each.message) for each in told if "refills" in str(each.message)] == [
        "3 prompts with equal rewards were dropped for one batch, as many as rollout.refills allows: further ones are trained on "
        "as they are, and the report counts them"
    ]
    assert [(len(step.groups), dict(step.dropped)) for step in steps] == [(2, {"filtered": 3})] * 2
    assert all(step.train.loss == 0.0 and step.train.grad_norm == 0.0 for step in steps)
    report = read_report(tmp_path / "run" / "report.json")
    assert report == run.report and not report.finished.failed
    assert report.filtering == Filtering(dropped=6, refills=6, trained=4)
    assert (report.prompts.admitted, report.prompts.trained, report.prompts.dropped) == (10, 4, {"filtered": 6})


def test_what_is_left_has_something_to_learn_from(tmp_path):
    def reward(prompt: str, completion: str, **columns: object) -> float:
        return float(len(completion) % 2)

    run, steps = run_of(tmp_path, reward, **{"rollout.filter": "flat", "rollout.groups_per_step": 8})
    assert all(step.flat_groups == 0 and len(step.groups) == 8 and step.train.grad_norm > 0 for step in steps)
    assert run.report.filtering.dropped == run.report.filtering.refills > 0 == run.report.filtering.trained


@pytest.mark.parametrize("kind", ["grpo", "reinforce++"])
def test_a_batch_in_which_all_were_cut(tmp_path, kind):
    """Nobody may end: every completion is cut, and with overlong masked nothing is left to train on. A step all the same."""
    changes = {"rollout.ignore_eos": True, "rollout.max_tokens": 4, "advantage.overlong": "mask", "advantage.kind": kind}
    run, steps = run_of(tmp_path, share_of_a, **changes)
    assert [(step.step, step.train.tokens, step.train.loss, step.train.grad_norm) for step in steps] == [
        (1, 0, 0.0, 0.0),
        (2, 0, 0.0, 0.0),
    ]
    assert all(math.isfinite(value) for step in steps for value in step.to_metrics().values() if isinstance(value, float))
    report = run.report
    assert (report.members.admitted, report.members.trained, report.members.dropped) == (8, 0, {"filtered": 8})
    assert (report.tokens.generated, report.tokens.trained, report.tokens.dropped) == (32, 0, {"filtered": 32})
    assert report.prompts.trained == 4 and report.staleness == {} and not report.finished.failed
    with JournalReader(run.folder.journal) as reader:
        counts = "SELECT count(r.trained_step), count(r.dropped = 'filtered'), count(DISTINCT g.trained_step || ' ' || group_id)"
        assert list(reader.query(f"{counts} FROM rollouts r JOIN groups g USING (group_id)")) == [(0, 8, 4)]


def test_what_was_cut_is_not_trained_on_and_the_books_say_so(tmp_path):
    changes = {"rollout.max_tokens": 9, "advantage.overlong": "mask", "rollout.groups_per_step": 8}
    run, steps = run_of(tmp_path, share_of_a, **changes)
    done = [rollout.completion for step in steps for group in step.groups for rollout in group.rollouts]
    ended = [each for each in done if not each.finish.truncated]
    assert 0 < len(ended) < len(done)
    tokens = sum(len(each.token_ids) for each in ended)
    report = run.report
    assert sum(step.train.tokens for step in steps) == tokens == report.tokens.trained == sum(report.staleness.values())
    assert (report.members.trained, report.members.dropped) == (len(ended), {"filtered": len(done) - len(ended)})
