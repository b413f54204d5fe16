"""What is done about long answers, with real engines: a member that is put off or moved has the tokens it had."""

from __future__ import annotations

from pathlib import Path

import pytest

import rollyard
from tests.small import config

LENGTHS = {"rollout.max_tokens": 48, "rollout.temperature": 1.0, "engine.slots": 8}


def test_tails_that_are_put_off_are_trained_later(tmp_path: Path) -> None:
    changes = {"rollout.max_staleness": 2, "rollout.oversample": 2, "rollout.order": "longest", "run.steps": 6}
    run = rollyard.Run(config(tmp_path / "run", **LENGTHS, **changes))
    lags, mixed, overtaken, before = set(), 0, 0, list[int]()
    for step in run:
        ids = [group.id for group in step.groups]
        overtaken += bool(before) and min(ids) < max(before)
        before += ids
        for rollout in (rollout for group in step.groups for rollout in group.rollouts):
            written = rollout.completion.spans
            lags |= {step.step - 1 - span.version.step for span in written}
            mixed += len({span.version for span in written}) > 1
            assert sum(span.tokens for span in written) == len(rollout.completion.token_ids)
    report = run.report
    assert report is not None and not report.finished.failed and report.steps == 6
    assert overtaken and mixed and max(lags) in (1, 2)  # what was put off went on under the next version
    assert report.prompts.trained == 24 and set(report.prompts.dropped) == {"oversampled"}
    assert report.tokens.generated == report.tokens.trained + sum(report.tokens.dropped.values())


@pytest.mark.slow
def test_members_move_to_an_idle_engine(tmp_path: Path) -> None:
    changes = {"place.placement": "separate", "place.generate": 2, "rollout.moves": 2, "run.steps": 6, "weights.canary": False}
    changes |= {"rollout.groups_per_step": 2, "rollout.group_size": 4}
    found = []
    for moves in (0, 2):
        run = rollyard.Run(config(tmp_path / f"run{moves}", **LENGTHS, **changes | {"rollout.moves": moves}))
        done = [(group.id, one.completion.token_ids) for step in run for group in step.groups for one in group.rollouts]
        assert run.report is not None and not run.report.finished.failed
        found.append((done, sum(device.busy_ns.get("generate", 0) > 0 for device in run.report.usage.devices)))
    assert found[0][0] == found[1][0] and found[1][1] == 2  # the same tokens, wherever they were written
