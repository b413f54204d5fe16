"""One simulated choice, in the numbers that a plan is made of."""

from __future__ import annotations

from rollyard.plan.advise import Ran
from rollyard.plan.forecast import forecast_of
from rollyard.plan.outcome import bound
from rollyard.plan.scenario import Scenario
from rollyard.plan.simulate import simulate


def ran(scenario: Scenario, first: int) -> Ran:
    """Simulate it.

    Args:
        first: steps that do not count.
    """
    done = simulate(scenario)
    report, ends, rows = done.report, done.steps_s, done.metrics[first:]
    seconds = (ends[-1] - ends[first - 1]) / (len(ends) - first)
    tokens = sum(int(str(row["tokens"])) for row in rows) / len(rows)
    return Ran(
        step_s=seconds,
        tokens_per_s=tokens / seconds,
        busy={pool.role: pool.busy_share for pool in report.usage.pools},
        slots=report.slots_busy,
        bound=bound(report, scenario),
        forecast=forecast_of(report, done.metrics[first - 1 :], scenario),  # which leaves out the first that it is given
    )
