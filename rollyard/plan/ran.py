"""One simulated choice, in the numbers that a plan is made of."""

from __future__ import annotations

from rollyard.errors import ConfigError
from rollyard.plan.advise import Ran
from rollyard.plan.forecast import forecast_of
from rollyard.plan.outcome import bound, counting, means_of
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
    report = done.report
    if report.finished.failed or report.steps <= first:
        lost = scenario.failures.node_hours or scenario.failures.joins
        problem = f"the run ends after {report.steps} of {scenario.run.steps} steps: {report.finished.cause}"
        remedy = "use more engines, --place.restarts, or fewer failures" if lost else "leave it out"
        raise ConfigError(problem, where="failures.node_hours" if lost else "place.placement", remedy=remedy)
    rows, report = done.metrics[first - 1 :], counting(done, first)  # means leave out the first row that they are given
    means = means_of(rows)
    return Ran(
        step_s=means["step_s"],
        trained_tokens_per_s=means["trained_tokens_per_s"],
        busy={pool.role: pool.busy_share for pool in report.usage.pools},
        slots=report.slots_busy,
        bound=bound(report, scenario),
        forecast=forecast_of(report, rows, scenario),
    )
