"""What a simulated run expects of a real one: the section `forecast` of its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

from rollyard.config import ForecastConfig
from rollyard.plan.outcome import means_of
from rollyard.plan.scenario import Scenario
from rollyard.watch.forecast import busy
from rollyard.watch.report import Report


def forecast_of(report: Report, metrics: Sequence[Mapping[str, object]], scenario: Scenario) -> ForecastConfig:
    """Without a step there is no forecast.

    Args:
        report: of a simulated run; its accounts are of the steps that count.
        metrics: a row a step; the first does not count, where there are others.
    """
    means = means_of(metrics)
    if not means:
        return ForecastConfig()
    found = {name: value for name, value in means.items() if name != "rest_s"} | dict(busy(report.usage.pools, report.slots_busy))
    steps = max(len(metrics) - 1, 1)
    told = f"{steps} step{'s' * (steps > 1)} on {scenario.cluster.hardware}, {scenario.place.placement}"
    source = f"rollyard {metadata.version('rollyard')}, {scenario.run.name}: {told}"
    return ForecastConfig(source=source, **{name: float(f"{value:.6g}") for name, value in found.items()})
