"""benchmarks/peers/peer_trl.py: what it asks of TRL."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

from rollyard.bench.peer import FOLDER

ABOUT = {"prompts": "/x/prompts.jsonl", "groups": 8, "size": 8, "tokens": 64, "fixed": False, "steps": 7, "learning_rate": 1e-6}


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER / "peers"))
    spec = importlib.util.spec_from_file_location("peer_trl", FOLDER / "peers" / "peer_trl.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delitem(sys.modules, "protocol")
    return module


@pytest.mark.parametrize(("micro", "rows", "passes"), [(None, 64, 1), (8, 8, 8)])
def test_a_step_trains_on_all_completions_whatever_the_micro_batch(peer, monkeypatch, micro, rows, passes):
    monkeypatch.setattr(peer, "MICRO", micro)
    options = peer.Trl(channel=None)._options(ABOUT)
    assert (options["per_device_train_batch_size"], options["gradient_accumulation_steps"]) == (rows, passes)
    assert options["num_generations"] == 8 and not options["gradient_checkpointing"]
    assert "generation_kwargs" not in options and "steps_per_generation" not in options
