"""What a simulation costs grows with the completions, and with nothing else."""

from __future__ import annotations

import sys
from types import FrameType

from rollyard.plan.check import check_scenario
from rollyard.plan.simulate import simulate
from tests.plan.scenarios import preset


def calls(engines: int, steps: int) -> float:
    """Calls of Python functions for each completion, 8 of which an engine gets at a step, as in the preset."""
    sizes = {"place__generate": engines, "place__train": engines // 2, "rollout__groups_per_step": engines // 2}
    scenario = preset("thousand", **sizes, run__steps=steps)
    check_scenario(scenario)
    made = 0

    def count(frame: FrameType, what: str, argument: object) -> None:
        nonlocal made
        made += what == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        done = simulate(scenario)
    finally:
        sys.setprofile(before)
    assert done.report.members.trained == steps * engines // 2 * 16
    assert 0 < done.report.slots_busy < 1 and len(done.steps_s) == steps
    return made / done.report.members.trained


def test_a_large_run_costs_no_more_a_completion_than_a_small_one() -> None:
    calls(8, 1)  # what is read or made once is not counted
    usual = calls(8, 4)
    assert calls(24, 4) < 1.15 * usual and calls(8, 12) < 1.15 * usual
