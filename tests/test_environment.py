"""Whose settings a process gets: the user's, Rollyard's, or both."""

from __future__ import annotations

import os

import pytest

from rollyard.environment import peer_environment, process_environment, settle_environment

NAMES = ("OMP_WAIT_POLICY", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "ROLLYARD_TUNED")


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
