"""New weights come to one engine after the other; what waits for them goes to all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from rollyard import events as ev
from rollyard.plan.check import check_scenario
from rollyard.plan.simulate import simulate
from tests.plan.scenarios import preset


@pytest.mark.parametrize("rollover", ["keep", "abort"])
def test_no_engine_takes_what_is_for_all(rollover: str) -> None:
    """8 engines with room for everything: none is handed twice its share of the tokens to read, once engines run."""
    scenario = preset(
        "cluster",
        run__steps=5,
        place__generate=8,
        place__train=8,
        engine__slots=512,
        rollout__groups_per_step=64,
        rollout__max_tokens=1024,
        workload__mean_tokens=300,
        weights__rollover=rollover,
    )
    check_scenario(scenario)
    rounds: list[Counter[str]] = []

    def heard(now: float, events: Sequence[ev.Event], instructions: Sequence[ev.Instruction]) -> None:
        if any(isinstance(said, ev.Publish) for said in instructions):
            rounds.append(Counter())
        for said in instructions:
            if isinstance(said, ev.Generate):
                rounds[-1][said.engine] += 1

    simulate(scenario, heard)
    handed = [counts for counts in rounds if counts.total() >= 256]
    assert len(handed) >= 4
    for counts in handed:
        assert max(counts.values()) < 2.5 * counts.total() / 8
