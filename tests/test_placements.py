"""The placements beside each other, on real parts: what is learnt does not depend on where and when the work is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import rollyard
from rollyard.config import Config
from rollyard.watch.report import Report

SMALL = {"steps": 3, "batch": 8, "width": 32, "feed_forward": 64, "heads": 2, "layers": 1}

Curve = list[tuple[int, list[tuple[object, ...]], float, float]]  # step, rollouts, loss, norm of the gradients


@pytest.fixture
def learnt(tmp_path: Path) -> Callable[..., tuple[Curve, Report]]:
    """Run a small task; what was trained on and what came of it. `changes` are dotted options."""

    def run(**changes: object) -> tuple[Curve, Report]:
        values = {
            "run.out": str(tmp_path / str(len(list(tmp_path.iterdir())))),
            "run.steps": 4,
            "prompts.held_out": 4,
            "rollout.group_size": 2,
            "rollout.groups_per_step": 4,
            "rollout.overtaking": "never",
            "engine.slots": 32,
            "engine.kernels": "plain",
            "train.lr": 1e-3,
        }
        small = {f"warmup.{name}": value for name, value in SMALL.items()}
        given = values | small | {name.replace("__", "."): value for name, value in changes.items()}
        done = rollyard.Run(resolved(given), reward=share_of_a)
        curve = [
            (
                step.step,
                [
                    (group.id, each.completion.member, each.completion.token_ids, each.completion.spans)
                    for group in step.groups
                    for each in group.rollouts
                ],
                step.train.loss,
                step.train.grad_norm,
            )
            for step in done
        ]
        assert done.report is not None and not done.report.finished.failed
        return curve, done.report

    return run


def resolved(given: dict[str, object]) -> Config:
    return rollyard.resolve(preset="sort", environment={}, overrides=given).config


def share_of_a(prompt: str, completion: str, **columns: object) -> float:
    return completion.count("a") / (1 + len(completion))


def same(one: Curve, other: Curve) -> None:
    """The same tokens by the same versions; losses and gradients up to what float32 rounds, whatever ran beside what."""
    for here, there in zip(one, other, strict=True):
        assert here[:2] == there[:2]
        assert here[2:] == pytest.approx(there[2:], abs=1e-6)
    assert any(norm for *_, norm in one)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_swap_learns_what_async_learns(learnt: Callable[..., tuple[Curve, Report]]) -> None:
    """With a lag of one version, in order, drained, and every batch written by one version."""
    swapped, report = learnt(place__placement="swap", rollout__max_staleness=1)
    overlapped, _ = learnt(place__placement="async", rollout__max_staleness=1)
    same(swapped, overlapped)
    assert len(report.weights.handed) == 3 and all(each.bytes > 0 and each.seconds > 0 for each in report.weights.handed)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "spread",
    [
        {"place__train": 2},
        {"place__placement": "separate", "place__generate": 2, "place__train": 2},
    ],
    ids=["two devices in turn", "two engines and two trainers"],
)
def test_how_many_there_are_changes_nothing(learnt: Callable[..., tuple[Curve, Report]], spread: dict[str, object]) -> None:
    one, _ = learnt()
    many, _ = learnt(**spread)
    same(one, many)
