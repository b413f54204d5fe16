"""The run as Prometheus is told of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollyard.dashboard.told import RUNNING, Overview
from rollyard.watch.live import Live
from rollyard.watch.prometheus import EngineFigures, Figures


def figures(told: Overview, live: Live | None, newest: Mapping[str, Any]) -> Figures:
    """What the page shows, as numbers with names. `newest`: the newest line of the metrics."""
    queue = None if told.state == RUNNING else 0
    return Figures(
        run=told.run,
        state=told.state,
        about={"model": told.model, "placement": told.placement, "engine": told.engine, "transport": told.transport},
        step=told.steps,
        planned=told.planned,
        version=told.version,
        eta_s=None if live is None else live.eta_s,
        lives=sum(life.begun is not None for life in told.lives) or 1,
        phases=told.phases,
        tokens=told.tokens,
        admitted=told.admitted,
        trained=told.trained,
        dropped=told.dropped,
        members_dropped=told.members.dropped,
        staleness=told.staleness,
        live_groups=told.live,
        waiting=queue if live is None else live.queue,
        eval_reward=told.eval.last,
        busy={pool.role: pool.busy_share for pool in told.pools},
        slots_busy=told.slots_busy,
        engines=() if live is None else [EngineFigures(each.name, each.version, None, each.running) for each in live.engines],
        metrics=newest,
    )
