"""The run as Prometheus is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollyard.dashboard.state import State
from rollyard.dashboard.told import Overview
from rollyard.watch.live import Live
from rollyard.watch.prometheus import EngineFigures, Figures


def figures(told: Overview, state: State, live: Live | None, newest: Mapping[str, Any]) -> Figures:
    """What the page shows, as numbers with names. `newest`: the newest line of the metrics."""
    if state.report is not None:
        return Figures.of(state.report, state.name, told.planned, newest)
    about = {"model": told.model, "placement": told.placement, "engine": told.engine, "transport": told.transport}
    return Figures(
        run=told.run,
        state=told.state,
        about=about,
        step=told.steps,
        planned=told.planned,
        version=None if live is None else live.version,
        eta_s=None if live is None else live.eta_s,
        lives=max(len(told.lives), 1),
        phases=told.phases,
        tokens=told.tokens,
        admitted=told.admitted,
        trained=told.trained,
        dropped=told.dropped,
        members_dropped=told.members.dropped,
        staleness=told.staleness,
        live_groups=told.live,
        waiting=None if live is None else live.queue,
        eval_reward=told.eval.last,
        slots_busy=told.slots_busy,
        engines=() if live is None else [EngineFigures(each.name, each.version, None, each.running) for each in live.engines],
        metrics=newest,
    )
