"""Whose settings a process gets: the user's, Rollyard's, or both."""

from __future__ import annotations

import os

import pytest

from rollyard.environment import (
    adopt,
    carried,
    only_devices,
    peer_environment,
    process_environment,
    settle_environment,
    settle_ray,
)

NAMES = ("OMP_WAIT_POLICY", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "ROLLYARD_TUNED", "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {name: value for name, value in os.environ.items() if name not in NAMES})


def test_rollyard_and_what_it_starts_wait_without_spinning():
    assert process_environment()["OMP_WAIT_POLICY"] == "PASSIVE"
    settle_environment()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE" and process_environment() == os.environ


def test_a_peer_gets_none_of_rollyards_tuning():
    before = dict(os.environ)
    settle_environment()
    settle_environment()
    assert peer_environment() == before | {"HF_HUB_OFFLINE": "1"}


def test_nor_does_the_peer_of_a_process_that_rollyard_started(monkeypatch):
    monkeypatch.setattr(os, "environ", process_environment())
    settle_environment()
    assert not {"OMP_WAIT_POLICY", "TOKENIZERS_PARALLELISM"} & peer_environment().keys()


@pytest.mark.parametrize("value", ["PASSIVE", "ACTIVE"])
def test_what_the_user_set_holds_for_both(value):
    os.environ["OMP_WAIT_POLICY"] = value
    settle_environment()
    assert os.environ["OMP_WAIT_POLICY"] == peer_environment()["OMP_WAIT_POLICY"] == value
    assert "TOKENIZERS_PARALLELISM" not in peer_environment()


def test_a_process_on_another_machine_keeps_its_own_folders():
    os.environ.update(PATH="/here", CUDA_VISIBLE_DEVICES="3", NCCL_DEBUG="INFO", ROLLYARD_ENGINE_KEY="secret")
    given = process_environment() | {"LD_PRELOAD": "/lib/libomp.so"}
    travels = carried(given)
    assert travels["NCCL_DEBUG"] == "INFO" and travels["LD_PRELOAD"] == "/lib/libomp.so"
    assert travels["OMP_WAIT_POLICY"] == "PASSIVE"
    assert not {"PATH", "CUDA_VISIBLE_DEVICES", "ROLLYARD_ENGINE_KEY"} & set(travels)
    os.environ.update(PATH="/there", OMP_NUM_THREADS="1")  # the last is Ray's guess
    adopt(travels)
    assert os.environ["PATH"] == "/there" and os.environ["NCCL_DEBUG"] == "INFO" and "OMP_NUM_THREADS" not in os.environ


def test_a_cluster_of_our_own_asks_for_a_token_unless_the_user_says_otherwise():
    os.environ["RAY_AUTH_MODE"] = "disabled"
    assert not settle_ray() and os.environ["RAY_AUTH_MODE"] == "disabled"
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        os.environ.pop(name, None)
    assert settle_ray() and not settle_ray()
    assert os.environ["RAY_AUTH_MODE"] == "token" and len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_a_process_sees_the_devices_that_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert only_devices(range(1, 3)) == {"CUDA_VISIBLE_DEVICES": "1,2"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert only_devices(range(1, 3)) == {"CUDA_VISIBLE_DEVICES": "6,7"}
