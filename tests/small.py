"""Small whole runs on real parts, and the processes that they start."""

from __future__ import annotations

import os
from pathlib import Path

import rollyard
from rollyard.config import Config
from rollyard.watch.report import Report
from tests.rewards import share_of_a

BASE = {"steps": 3, "batch": 8, "width": 32, "feed_forward": 64, "heads": 2, "layers": 1}
ENGINE, HOST = "rollyard.hosts:serve_engine", "rollyard.hosts:serve_host"  # what other processes run

Curve = list[tuple[int, list[tuple[object, ...]], float, float]]  # step, rollouts, loss, norm of the gradients


def config(out: Path, **changes: object) -> Config:
    """Of a small run of a built-in task. `changes` are options, with dots or two underscores in their names."""
    values = {
        "run.out": str(out),
        "run.steps": 4,
        "rollout.group_size": 2,
        "rollout.groups_per_step": 4,
        "engine.slots": 32,
        "engine.kernels": "plain",
        "weights.limit_s": 60,
    }
    base = {f"warmup.{name}": value for name, value in BASE.items()}
    given = values | base | {name.replace("__", "."): value for name, value in changes.items()}
    return rollyard.resolve(preset="sort", environment={}, overrides=given).config


def learnt(config_: Config) -> tuple[Curve, Report]:
    """Run it: what was trained on, what came of it, and the report of a run that did not fail."""
    run = rollyard.Run(config_, reward=share_of_a)
    curve: Curve = []
    for step in run:
        done = [(group.id, rollout.completion) for group in step.groups for rollout in group.rollouts]
        rollouts = [(group, each.member, each.token_ids, each.spans) for group, each in done]
        curve.append((step.step, rollouts, step.train.loss, step.train.grad_norm))
        assert step.train.tokens == sum(len(each.token_ids) for _, each in done), "the numbers of a step are of all ranks"
    assert run.report is not None and not run.report.finished.failed
    return curve, run.report


def children(target: str) -> list[int]:
    """Children of this process that run `target`, the oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and target.encode() in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return sorted(found)
