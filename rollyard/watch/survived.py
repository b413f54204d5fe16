"""The report's table of faults on purpose, as a rich renderable."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.chaos.survival import Survived, Tally

TOLD: Final = ("lost", "repeated", "recovered")


def survival(faults: Sequence[Survived]) -> list[RenderableType]:
    """What came of each, and of all together; nothing where there were none."""
    if not faults:
        return []
    grid = Table.grid(padding=(0, 2), expand=True)
    for name in ("fault", "at"):
        grid.add_column(name, no_wrap=True)
    for name in (*TOLD, "delay"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("outcome", ratio=1)
    grid.add_row("fault", "at", *TOLD, "delay", "what came of it", style="bold")
    several = any(each.life for each in faults)
    for each in faults:
        at = f"{each.at_s:.1f} s" + (f" of life {each.life + 1}" if several else "")
        told = (_shown(getattr(each, name)) for name in TOLD)
        grid.add_row(f"{each.what} {each.process}", at, *told, _seconds(each.delay_s), Text(each.outcome or "not over"))
    whole = (_shown(_sum([getattr(each, name) for each in faults])) for name in TOLD)
    delay_s = sum(each.delay_s or 0.0 for each in faults)
    grid.add_row(
        f"{len(faults)} faults", "", *whole, _seconds(delay_s), "members (tokens) that were on their way there", style="bold"
    )
    return [Text(), grid]


def _sum(tallies: Sequence[Tally]) -> Tally:
    return Tally(sum(each.members for each in tallies), sum(each.tokens for each in tallies))


def _shown(tally: Tally) -> str:
    return f"{tally.members:,} ({tally.tokens:,})" if tally.members else "-"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.2f} s"
