"""A whole run, small and real, with all that an objective can have; what of it the metrics and the report tell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.small import config, learnt

OBJECTIVE: dict[str, Any] = {
    "train.loss": "gspo",
    "train.aggregation": "sequence",
    "train.correction": "mask",
    "train.correction_cap": 1.5,
    "train.minibatches": 2,
    "train.kl": 0.05,
    "train.lr": 1e-3,
    "advantage.kind": "gae",
}


def run(tmp_path: Path, **changes: Any) -> list[dict[str, Any]]:
    curve, report = learnt(config(tmp_path / "run", **OBJECTIVE | changes))
    assert report.objective.startswith("gspo, mask at 1.5, 2 minibatches, KL 0.05 (k3) to the first policy, ")
    assert report.objective.endswith(" bytes beside each trainer, a value head") and len(curve) == 4
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def tells(lines: list[dict[str, Any]]) -> None:
    """The policy leaves the first one; the head is off by something; tokens of a second minibatch have other ratios."""
    assert lines[-1]["train/kl"] > lines[0]["train/kl"] >= 0 and lines[-1]["train/kl"] > 1e-6
    assert all(line["train/value_loss"] > 0 for line in lines)
    assert all(line["train/ratio_p1"] <= line["train/ratio_mean"] <= line["train/ratio_p99"] for line in lines)
    assert lines[0]["train/ratio_p1"] < 1 - 1e-4 < 1 + 1e-4 < lines[0]["train/ratio_p99"]
    assert lines[0]["train/logprob_gap_max"] < 1e-4  # of the policy before the first step


def test_all_of_it_at_once(tmp_path: Path) -> None:
    tells(run(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        {"place.placement": "swap", "rollout.max_staleness": 1},
        {"place.placement": "separate", "place.train": 2, "train.shard": True},
    ],
    ids=["swap", "shard"],
)
def test_where_there_are_several_trainers(tmp_path: Path, place: dict[str, Any]) -> None:
    tells(run(tmp_path, **place))
