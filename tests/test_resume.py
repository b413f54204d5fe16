"""Runs that are killed, or stopped, go on. Real runs around doubles; tests/test_killed.py has real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.resuming import Death, Life, live, work

pytestmark = pytest.mark.filterwarnings("ignore:closing the run. Killed")

POINTS = [
    f"{when} {what}"
    for what in ("life", "flush", "checkpoint folder", "checkpoint", "checkpoint pruned")
    for when in ("before", "after")
]


def steps_of(path: Path) -> list[tuple[int, int]]:
    """Steps in the metrics, and the life that each was done in."""
    rows = [json.loads(line) for line in (path / "run" / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["incarnation"]) for row in rows]


def uninterrupted(path: Path, **named) -> Life:
    (path / "whole").mkdir()
    return live(path / "whole", work(), **named)


@pytest.mark.parametrize("placement", ["separate", "async"])
@pytest.mark.parametrize("point", POINTS)
def test_killed_between_any_two_writes_it_ends_as_if_it_never_was(tmp_path, point, placement):
    whole = uninterrupted(tmp_path, placement=placement)
    lives = [live(tmp_path, work(), placement=placement, death=Death(point, 1 if point.endswith("life") else 2))]
    while not lives[-1].finished and len(lives) < 9:
        death = Death(point, 1) if len(lives) < 3 else None
        lives.append(live(tmp_path, work(), death=death))
    last = lives[-2]
    assert lives[-1].finished and last.report is not None
    assert last.weights == whole.weights and last.known == whole.known
    assert [step for step, _ in steps_of(tmp_path)] == [1, 2, 3, 4, 5]
    report, plain = last.report, whole.report
    assert plain is not None and report.steps == plain.steps == 5 and report.reward == plain.reward
    assert report.prompts == plain.prompts and report.staleness == plain.staleness
    assert report.tokens.trained == plain.tokens.trained
    assert report.lives.begun == tuple(each.past.version.step for each in lives[:-1] if each.asked or each.steps or each is last)


def test_twenty_prompts_of_which_eight_are_trained_three_wait_and_four_are_under_way(tmp_path):
    """The other twelve once each: of those that were finished or begun, with what they had written."""
    of = work(steps=10, groups=2, size=2, staleness=3, slots=4, median=30, cap=60)
    live(tmp_path, of, placement="async", prompts=20, until_s=7.0, checkpoint__every=2)
    second = live(tmp_path, of, prompts=20)
    assert sorted(id_ for batch in second.known for id_ in batch) == list(range(20))
