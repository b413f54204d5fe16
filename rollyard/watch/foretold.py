"""The report's table of a forecast and what came of it, as a rich renderable."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.watch.forecast import Compared, Forecast

NAMES: Final[Mapping[str, str]] = {
    "step_s": "step",
    "trained_tokens_per_s": "trained tok/s",
    "engine_busy": "engines busy",
    "trainer_busy": "trainers busy",
    "slots_busy": "slots busy",
}


def foretold(found: Forecast | None) -> list[RenderableType]:
    """Each number of the forecast beside what was measured, but for what is nothing in both; nothing without a forecast."""
    if found is None:
        return []
    grid = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="bold", show_edge=False)
    grid.add_column("of a step", width=13, no_wrap=True)
    for name in ("forecast", "measured", "ratio"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column(ratio=1)
    for row in (row for row in found.rows if row.forecast or row.measured):
        ratio = "-" if row.ratio is None else f"{row.ratio:.2f}"
        name = NAMES.get(row.name, row.name.removesuffix("_s"))
        grid.add_row(name, _shown(row, row.forecast), _shown(row, row.measured), ratio, "")
    told = f"measured over {found.steps} step{'s' if found.steps != 1 else ''}; forecast of {found.source or 'an unnamed source'}"
    return [Text(), grid, Text(told, "dim")]


def _shown(row: Compared, value: float | None) -> str:
    if value is None:
        return "-"
    if row.name.endswith("_busy"):
        return f"{value:.1%}"
    return f"{value:,.0f}" if row.name == "trained_tokens_per_s" else f"{value:.4g} s"
