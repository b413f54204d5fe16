"""What an evaluation comes to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.evaluate import Evaluation
from rollyard.events import Admit, Evaluate, EvaluationCut, Generate, Train
from rollyard.rollout.controller import Controller
from rollyard.types import Completion, Request, Reward, WeightVersion
from tests.plan.sides import Case, real


def test_means_are_over_those_that_have_a_verdict():
    """Four completions were asked, three judged, one of them without a verdict in all: that one has a number by name."""
    rewards = [
        Reward(1.0, {"right": 1.0, "short": 0.0}),
        Reward(0.5, {"right": 0.5}),
        Reward(None, {"short": 0.5}),
        Reward(math.inf),
    ]
    assert Evaluation.of(rewards, 5, 70) == Evaluation(0.75, 5, 3, {"right": 0.75, "short": 0.25}, 70)


def test_nobody_judged():
    assert Evaluation.of([], 2, 0) == Evaluation(None, 2, 2, {}, 0)


CASES = (
    Case("colocated", held_out=5, steps=5, judge_s=0.05),
    Case("separate", held_out=5, steps=5, judge_s=0.05),
    Case("swap", held_out=5, steps=5),
    Case("async", "drain", held_out=9, steps=5, judge_s=0.05),
    Case("async", "abort", held_out=9, steps=5, losses=((1.4, 1),)),
    Case("async", "keep", held_out=9, steps=5, staleness=2),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.placement}-{case.rollover}")
def test_every_second_version_is_evaluated_by_itself_and_beside_the_run(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held-out prompts are answered by engines of that version alone; what the run trains on is what it would be without them."""
    asked: list[tuple[WeightVersion, Completion]] = []
    answers = Controller.complete

    async def complete(
        self: Controller, requests: Sequence[Request], engines: Sequence[str] = (), version: WeightVersion | None = None
    ) -> list[Completion]:
        done = await answers(self, requests, engines, version)
        assert version is not None, "nothing else is asked beside the run here"
        asked.extend((version, each) for each in done)
        return done

    monkeypatch.setattr(Controller, "complete", complete)
    (tmp_path / "with").mkdir()
    side = real(replace(case, options=(("eval.every", 2),)), tmp_path / "with")
    report, said = side.report, [each for _, events, told in side.steps for each in (*events, *told)]
    assert report is not None and not report.finished.failed

    evaluated = [each.version.step for each in said if isinstance(each, Evaluate)]
    cut = sum(isinstance(each, EvaluationCut) for each in said)
    assert sorted(set(evaluated)) == [0, 2, 4, 5] and len(evaluated) == 4 + cut, "the first, every second, and the last"
    assert len(asked) == 4 * case.held_out == report.eval.samples
    for version, done in asked:
        assert {span.version for span in done.spans} == {version} and done.group < 0
    assert report.eval.tokens == sum(len(done.token_ids) for _, done in asked)

    admitted = [each.prompt.id for each in said if isinstance(each, Admit)]
    trained = [group.id for each in said if isinstance(each, Train) for group in each.groups]
    handed_out = [each.request.id.group for each in said if isinstance(each, Generate)]
    assert min((*admitted, *trained, *handed_out)) >= 0 and max((*admitted, *trained)) < 1000, "held-out ones begin with 1000"
    assert report.generation_tokens == report.tokens.generated, "their tokens are not among those of rollouts"

    assert report.phases.eval_s > 0
    spent = sum(device.busy_ns.get("eval", 0) for device in report.usage.devices if "engine" in device.roles)
    assert spent > 0, "and the engines' devices say what it took"
    if case.placement in ("async",):
        return  # when engines are busy decides what a batch is made of
    (tmp_path / "without").mkdir()
    without = real(replace(case, held_out=0), tmp_path / "without")
    left = [[group.id for group in each.groups] for _, _, told in without.steps for each in told if isinstance(each, Train)]
    assert [group for batch in left for group in batch] == trained
    assert without.report is not None and without.report.phases.eval_s == 0 and without.report.eval.tokens == 0
    assert not any("eval" in device.busy_ns for device in without.report.usage.devices), "probes are none"
