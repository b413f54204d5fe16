"""Numbers of devices belong to the kind that they were given for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollyard.cli import main
from rollyard.plan.kinds import left_behind, resolve_scenario
from rollyard.plan.scenario import ClusterConfig


def resolved(**given: Any) -> tuple[ClusterConfig, list[str]]:
    found = resolve_scenario(lambda _: None, **{"overrides": {}} | given)
    return found.config.cluster, left_behind(found)


LAPTOP = ["cluster.node", "cluster.memory", "cluster.bandwidth", "cluster.flops"]


def test_another_kind_leaves_the_numbers_of_a_preset_behind() -> None:
    assert resolved(preset="small", overrides={"cluster.hardware": "H100"}) == (ClusterConfig(hardware="H100"), LAPTOP)
    own, left = resolved(preset="small", overrides={"cluster.hardware": "H100", "cluster.flops": 1e15, "cluster.node": "4"})
    assert own == ClusterConfig(hardware="H100", flops=1e15, node=4) and left == LAPTOP[1:3]


def test_the_same_kind_keeps_them() -> None:
    for overrides in ({}, {"cluster.hardware": "cpu"}, {"cluster.price": 2.0}):
        found, left = resolved(preset="small", overrides=overrides)
        assert found.flops == 150e9 and not left


def test_a_file_and_the_environment_name_kinds_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[cluster]\nhardware = "A100-80"\nnic = 1e10')
    assert resolved(preset="small", file=file) == (ClusterConfig(hardware="A100-80", nic=1e10), LAPTOP)
    assert resolved(file=file, overrides={"cluster.hardware": "H100"}) == (ClusterConfig(hardware="H100"), ["cluster.nic"])
    monkeypatch.setenv("ROLLYARD_CLUSTER__HARDWARE", "H20")
    found, left = resolved(preset="small", file=file)
    assert found == ClusterConfig(hardware="H20") and set(left) == {*LAPTOP, "cluster.nic"}


def test_numbers_of_no_named_kind_are_of_any(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[cluster]\nmemory = 4e10")
    found, left = resolved(file=file, overrides={"cluster.hardware": "A100-80"})
    assert found == ClusterConfig(hardware="A100-80", memory=4e10) and not left


def test_what_is_left_behind_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["simulate", "--preset", "small", "--steps", "2", "--gpus", "8xH100", "--json"]
    assert main(small) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"] == "H100"
    assert found["notes"][0].startswith("devices are H100: cluster.node, cluster.memory, cluster.bandwidth, cluster.flops of")
