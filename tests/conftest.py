"""What every test shares: one torch thread, no cache of the user's, nothing left behind in the work tree."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

# Read by OpenMP when torch is first imported, which no test module does before this file has run.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that reaches for a network is a mistake

import pytest
from hypothesis import settings

# Machines differ in speed: a slow example is no failure, and the time limit of each test bounds the whole.
settings.register_profile("rollyard", deadline=None)
settings.load_profile("rollyard")


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Tiny models are fastest on one thread; a test that changes the number gives it back."""
    yield
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
