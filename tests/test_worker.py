"""What `auto` stands for."""

from __future__ import annotations

import pytest

from rollyard import worker
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.events import Rollover
from rollyard.layers import resolve
from rollyard.types import Capabilities

TASK = {"prompts.task": "sort"}


@pytest.mark.parametrize(
    ("placement", "limit", "asked", "found"),
    [
        ("colocated", 0, "auto", Rollover.DRAIN),
        ("separate", 0, "auto", Rollover.DRAIN),
        ("swap", 1, "auto", Rollover.DRAIN),
        ("async", 1, "auto", Rollover.KEEP),
        ("async", 1, "drain", Rollover.DRAIN),
        ("async", 1, "abort", Rollover.ABORT),
    ],
)
def test_requests_in_flight(placement: str, limit: int, asked: str, found: Rollover) -> None:
    options = TASK | {"place.placement": placement, "rollout.max_staleness": limit, "weights.rollover": asked}
    assert worker.rollover_of(resolve(environment={}, overrides=options).config) is found


def test_an_engine_that_cannot_keep_is_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CAPABILITIES, "embedded", Capabilities(keep=False))
    config = resolve(environment={}, overrides=TASK | {"place.placement": "async", "rollout.max_staleness": 1}).config
    assert worker.rollover_of(config) is Rollover.DRAIN
