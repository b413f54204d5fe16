"""Whole runs that train an adapter: wherever engines are, only it travels, and they decode with what the trainer has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rollyard import checks, worker
from rollyard.config import Config, EngineConfig
from rollyard.engine.vllm import arguments as vllm
from rollyard.errors import ConfigError
from rollyard.model import adapter
from rollyard.model.architecture import Architecture, base_of
from rollyard.model.folder import tensors
from rollyard.warmup import architecture
from rollyard.watch.report import Report
from tests.small import ENGINE, Curve, children, config, learnt

LORA = {"weights.what": "lora", "lora.rank": 4, "lora.alpha": 8, "train.lr": 1e-2, "run.steps": 3, "weights.probe_every": 0}
TENSORS = 14  # A and B of seven linears in the one layer
BYTES = 4 * 4 * (4 * (32 + 32) + 3 * (32 + 64))  # of a version: 4 of each number, rank 4
NEAR = {"rel": 1e-4, "abs": 1e-6}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    return lambda **changes: config(tmp_path / "run", **LORA | changes)


def looked_after(report: Report) -> None:
    found = report.weights
    assert found.canary is not None and found.canary.unseen == () and found.canary.tensors == TENSORS
    assert found.probes == {"undecidable": 1, "verified": 3}  # there is no version before the first


def same(curve: Curve, other: Curve) -> None:
    for (step, rollouts, loss, norm), (_, others, other_loss, other_norm) in zip(curve, other, strict=True):
        assert rollouts == others, step
        assert loss == pytest.approx(other_loss, **NEAR) and norm == pytest.approx(other_norm, **NEAR)


@pytest.mark.slow
def test_wherever_the_engine_is_a_run_is_the_same_one(make: Callable[..., Config]) -> None:
    curve, report = learnt(make())
    looked_after(report)
    assert report.weights.bytes_copied == 0  # the engine merges what it has at hand
    other, report = learnt(make(**{"place.placement": "separate", "run.overwrite": True}))
    looked_after(report)
    # Version 0, the canary's versions and version 0 again, three more.
    assert report.weights.bytes_copied % BYTES == 0 and 6 <= report.weights.bytes_copied // BYTES <= 11
    same(curve, other)
    assert not children(ENGINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"place.placement": "separate", "weights.transport": "checkpoint"},
        {"place.placement": "separate", "weights.transport": "broadcast", "place.train": 2},
        {"place.train": 2},
    ],
    ids=["checkpoint", "broadcast from two ranks", "two colocated ranks"],
)
def test_the_same_over_other_ways(make: Callable[..., Config], changes: dict[str, object]) -> None:
    curve, _ = learnt(make())
    other, report = learnt(make(**changes, **{"run.overwrite": True}))
    assert report.weights.canary is not None and report.weights.canary.unseen == ()
    same(curve, other)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"place.placement": "swap"},
        *({"place.placement": "async", "weights.rollover": each} for each in ("drain", "abort", "keep")),
    ],
    ids=["swap", "drain", "abort", "keep"],
)
def test_generation_goes_on_while_an_adapter_is_trained(make: Callable[..., Config], changes: dict[str, object]) -> None:
    curve, report = learnt(make(**changes, **{"rollout.max_staleness": 1}))
    assert len(curve) == 3 and report.weights.canary is not None and report.weights.canary.unseen == ()
    assert "contradicted" not in report.weights.probes and report.weights.probes["verified"] > 0


def test_a_checkpoint_is_where_another_run_begins(make: Callable[..., Config], tmp_path: Path) -> None:
    learnt(made := make())
    checkpoint = tmp_path / "run" / "checkpoints" / "step-000003"
    policy = worker.load_policy(made, checkpoint)
    assert base_of(checkpoint) != checkpoint and Architecture.from_folder(checkpoint) == policy.model.architecture
    assert all(tensor.abs().max() > 0 for tensor in tensors(policy.model).values())  # B was learnt
    base = worker.load_model(made, checkpoint)
    assert all(torch.equal(tensor, tensors(base)[name]) for name, tensor in adapter.base(policy.model).items())
    with pytest.raises(ConfigError, match="holds an adapter, and all parameters are trained"):
        worker.load_policy(config(tmp_path / "other"), checkpoint)


def test_what_an_adapter_needs_is_there_or_said(make: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="vLLM has no room for a rank of 513"):
        vllm.check(EngineConfig(kind="vllm"), "shared_memory", 1.0, rank=513)
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="trained with PEFT, which is not installed") as told:
        checks.check(make(), architecture(make()))
    assert "rollyard[lora]" in str(told.value)
