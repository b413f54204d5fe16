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
    """Of a simulated run's report, and of its metrics, a row a step. Without a step there is no forecast."""
    means = means_of(metrics)
    if not means:
        return ForecastConfig()
    found = {name: value for name, value in means.items() if name != "rest_s"} | dict(busy(report.usage.pools, report.slots_busy))
    told = f"{len(metrics)} steps on {scenario.cluster.hardware}, {scenario.place.placement}"
    source = f"rollyard {metadata.version('rollyard')}, {scenario.run.name}: {told}"
    return ForecastConfig(source=source, **{name: float(f"{value:.6g}") for name, value in found.items()})
