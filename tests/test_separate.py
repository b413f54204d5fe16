"""Whole runs with engines in processes of their own: every transport, and an engine that is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

import rollyard
from rollyard.config import Config
from rollyard.errors import RunFailed
from tests.small import ENGINE, children, config


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    """Config of a small run with engines in processes of their own; `changes` are options."""
    own = {"run.steps": 2, "place.placement": "separate", "prompts.held_out": 4, "rollout.groups_per_step": 2}
    return lambda **changes: config(tmp_path / "run", **own | {name.replace("__", "."): each for name, each in changes.items()})


WAYS = ("shared_memory", "broadcast delta", "checkpoint")  # here; whole and in part over each: tests/weights/test_moving.py


@pytest.mark.parametrize(
    "transport", [*WAYS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("broadcast", "checkpoint delta"))]
)
def test_a_run_over_each_transport(make: Callable[..., Config], transport: str) -> None:
    """Whole, and only what changed; a broadcast to two engines, of which one receives."""
    transport, _, delta = transport.partition(" ")
    engines = 2 if transport == "broadcast" else 1
    run = rollyard.Run(make(weights__transport=transport, weights__delta=bool(delta), place__generate=engines))
    for step in run:
        spans = [span for group in step.groups for rollout in group.rollouts for span in rollout.completion.spans]
        assert {span.version.step for span in spans} == {step.step - 1}
        assert step.train.logprob_gap_max < 1e-4  # the engine's logprobs are the trainer's
    report = run.report
    assert report is not None and not report.finished.failed and report.steps == 2
    assert report.weights.transport == transport and report.eval.last is not None
    assert report.weights.canary is not None and report.weights.canary.unseen == ()
    assert report.weights.bytes_sent > 0 and (report.weights.unchanged is not None) == bool(delta)
    if transport == "broadcast":
        spans = (run.folder.path / "trace.json").read_text(encoding="utf-8")
        assert spans.count("bucket 1 of 1") >= 2 * 2  # at the trainer and at the engine that receives
    assert not children(ENGINE)


@pytest.mark.parametrize("rollover", [*(pytest.param(each, marks=pytest.mark.slow) for each in ("drain", "abort")), "keep"])
def test_generation_goes_on_while_the_trainer_trains(make: Callable[..., Config], rollover: str) -> None:
    changes = {"rollout.max_staleness": 1, "weights.rollover": rollover, "run.steps": 4, "place.placement": "async"}
    lags, run = set(), rollyard.Run(make(**changes))
    for step in run:
        spans = [span for group in step.groups for rollout in group.rollouts for span in rollout.completion.spans]
        lags |= {step.step - 1 - span.version.step for span in spans}
        fresh = [span.version.step == step.step - 1 == span.oldest_kv.step for span in spans]
        assert (step.train.fresh_gap_max is None, step.train.stale_gap_max is None) == (not any(fresh), all(fresh))
        assert (step.train.fresh_gap_max or 0.0) < 1e-4  # whatever the policy has become since older tokens were written
    report = run.report
    assert report is not None and not report.finished.failed and report.steps == 4
    assert lags == {0, 1}
    assert not children(ENGINE)


@pytest.mark.slow
def test_without_staleness_async_is_separate(make: Callable[..., Config], tmp_path: Path) -> None:
    found = []
    for placement in ("separate", "async"):
        run = rollyard.Run(make(place__placement=placement, run__out=str(tmp_path / placement), run__steps=3))
        done = [(step.step, group.id, rollout.completion) for step in run for group in step.groups for rollout in group.rollouts]
        found.append([(step, group, each.member, each.spans, each.token_ids) for step, group, each in done])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_run_whose_engine_is_killed_goes_on_with_the_other(make: Callable[..., Config]) -> None:
    changes = {"weights.transport": "broadcast", "weights.limit_s": 60, "run.steps": 4, "place.generate": 2}
    run = rollyard.Run(make(**changes, place__restarts=0))
    for step in run:
        if step.step == 1:
            os.kill(children(ENGINE)[0], signal.SIGKILL)
    report = run.report
    assert report is not None and not report.finished.failed and report.steps == 4 and report.eval.last is not None
    assert report.wall_s < 60  # nobody waited for the dead one until the limit
    with sqlite3.connect(run.folder.journal) as journal:
        assert journal.execute("SELECT count(*) FROM engine_events WHERE event = 'lost'").fetchone() == (1,)
    walls = sorted(device.wall_ns for device in report.usage.devices if device.device.startswith("engine"))
    assert len(walls) == 2 and walls[0] < walls[1]  # its time ends where it was given up


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["separate", "async"])
def test_an_engine_that_is_killed_is_started_again(make: Callable[..., Config], placement: str) -> None:
    changes = {"place.placement": placement, "rollout.max_staleness": int(placement == "async"), "run.steps": 5}
    run = rollyard.Run(make(**changes))
    for step in run:
        if step.step == 2:
            os.kill(children(ENGINE)[0], signal.SIGKILL)
    report = run.report
    assert report is not None and not report.finished.failed and report.steps == 5 and report.eval.last is not None
    assert (report.prompts.admitted, dict(report.prompts.dropped)) == (report.prompts.trained, {})
    assert not children(ENGINE)


@pytest.mark.slow
def test_an_engine_that_is_killed_too_often_ends_the_run(make: Callable[..., Config]) -> None:
    run = rollyard.Run(make(run__steps=50))
    with pytest.raises(RunFailed, match=r"no engine is left: engine engine-0 is lost: it was ended by signal 9"):
        for step in run:
            if step.step in (1, 3):
                os.kill(children(ENGINE)[0], signal.SIGKILL)
    assert not children(ENGINE)
