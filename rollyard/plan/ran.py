"""One simulated choice, in the numbers that a plan is made of."""

from __future__ import annotations

from rollyard.errors import ConfigError
from rollyard.plan.advise import Ran
from rollyard.plan.forecast import forecast_of
from rollyard.plan.outcome import bound
from rollyard.plan.scenario import Scenario
from rollyard.plan.simulate import simulate


def ran(scenario: Scenario, first: int) -> Ran:
    """Simulate it.

    Args:
        first: steps that do not count.

    Raises:
        ConfigError: the run fails, or does not fit.
    """
    done = simulate(scenario)
    report, ends, rows = done.report, done.steps_s, done.metrics[first:]
    if report.finished.failed or len(ends) <= first:
        lost = scenario.failures.node_hours or scenario.failures.joins
        problem = f"the run ends after {report.steps} of {scenario.run.steps} steps: {report.finished.cause}"
        remedy = "use more engines, --place.restarts, or fewer failures" if lost else "leave it out"
        raise ConfigError(problem, where="failures.node_hours" if lost else "place.placement", remedy=remedy)
    seconds = (ends[-1] - ends[first - 1]) / (len(ends) - first)
    tokens = sum(int(str(row["train/tokens"])) for row in rows) / len(rows)
    return Ran(
        step_s=seconds,
        tokens_per_s=tokens / seconds,
        busy={pool.role: pool.busy_share for pool in report.usage.pools},
        slots=report.slots_busy,
        bound=bound(report, scenario),
        forecast=forecast_of(report, done.metrics[first - 1 :], scenario),  # which leaves out the first that it is given
    )
