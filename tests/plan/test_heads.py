"""Heads of a model and the devices of an engine: which sizes there are."""

from __future__ import annotations

import json

import pytest

from rollyard.cli import main
from rollyard.errors import ConfigError
from rollyard.plan.devices import check_heads
from rollyard.plan.models import shape_of
from rollyard.plan.scenario import Scenario
from rollyard.plan.space import with_options


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("qwen2.5-7b", {1, 2, 4, 28}),  # 28 heads, 4 of keys and values: 7 devices would cut one of these
        ("llama-8b", {1, 2, 4, 8, 16, 32}),  # 32, 8
        ("smollm2-135m", {1, 3, 9}),  # 9, 3
        ("deepseek-v3", {1, 2, 4, 8, 16, 32, 64, 128}),  # 128, and what all of them share
    ],
)
def test_sizes_by_hand(model: str, sizes: set[int]) -> None:
    shape, found = shape_of(model), set()
    for size in (*range(1, 200), 999_999_999_999):
        try:
            check_heads(with_options(Scenario(), {"engine.tensor_parallel_size": size}), shape)
            found.add(size)
        except ConfigError as error:
            assert all(str(each) in error.remedy for each in sizes)
    assert found == sizes


CLUSTER = ["simulate", "--preset", "cluster", "--steps", "2", "--prompts-per-step", "8"]


@pytest.mark.parametrize("size", [3, 5, 16, 1_000_000])
def test_other_sizes_are_refused(size: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CLUSTER, "--engine.tensor_parallel_size", str(size)]) == 2
    assert "use 1, 2, 4 or 28" in capsys.readouterr().err


@pytest.mark.parametrize("devices", [10, 16, 32, 64])
def test_halves_have_such_sizes_too(devices: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*CLUSTER, "--gpus", str(devices), "--placement", "swap"]) == 2
    told = capsys.readouterr().err
    assert f"{devices // 2} devices, and each half is one engine" in told and "2, 4, 8 or 56 devices in all" in told


@pytest.mark.parametrize(("devices", "told"), [(8, "4 devices"), (56, "28 devices, on 4 nodes")])
def test_a_half_is_told(devices: int, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--gpus", str(devices), "--placement", "swap", "--json", "--train.shard", "false", "--mean-tokens", "200"]
    assert main([*CLUSTER, *more, "--costs.offload", "true"]) == 0
    assert f"each half is one engine of {told}" in json.loads(capsys.readouterr().out)["notes"]
