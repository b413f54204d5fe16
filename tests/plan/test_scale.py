"""What a simulation costs grows with the completions, and with nothing else."""

from __future__ import annotations

from rollyard.plan.check import check_scenario
from rollyard.plan.simulate import Play
from rollyard.plan.stations import stations_of
from tests.plan.scenarios import preset


def turns(engines: int, steps: int) -> float:
    """What the clock and the core did for each completion: 8 a step and engine, as in the preset."""
    sizes = {"place__generate": engines, "place__train": engines // 2, "rollout__groups_per_step": engines // 2}
    scenario = preset("thousand", **sizes, run__steps=steps)
    check_scenario(scenario)
    play = Play(scenario, stations_of(scenario))
    done = play.run()
    assert done.report.members.trained == steps * engines // 2 * 16
    assert 0 < done.report.slots_busy < 1 and len(done.steps_s) == steps
    return (play.clock.done + done.events) / done.report.members.trained


def test_a_large_run_costs_no_more_a_completion_than_a_small_one() -> None:
    usual = turns(8, 4)
    assert turns(32, 4) < 1.15 * usual and turns(8, 16) < 1.15 * usual
