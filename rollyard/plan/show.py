"""A simulated run for people, as a rich renderable. Programs get the same record as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollyard.plan.outcome import Spread, Summary
from rollyard.watch.accounts import TRAINER
from rollyard.watch.draw import COLOURS, duration, stacked

LABEL: Final = 9  # columns of the names at the left
BAR: Final = 60  # columns of the bar of phases
ROOM: Final = 66  # columns of a line in a terminal of 80
SHOWN: Final = 0.005  # a smaller share is not worth its place
FOR: Final[dict[str, str]] = {  # what a device waits for, in words
    "train": "training",
    "sync": "weights",
    "generate": "generation",
    "score": "scoring",
    "eval": "evaluation",
    "checkpoint": "a checkpoint",
    "restart": "a restart",
    "closing": "the end",
    "unexplained": "nothing that is known",
}
OF_TRAINER: Final = {"train": "its batch or other trainers"}
REST: Final = "unaccounted"  # whose colour it has


def table(summary: Summary) -> RenderableType:
    """What a step takes, on what, what bounds it, and what became of the prompts."""
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="bold", width=LABEL, no_wrap=True)
    grid.add_column(ratio=1)
    for name, shown in _rows(summary):
        grid.add_row(name, shown)
    title = Text(f"rollyard · {summary.name} (simulated)", "bold")
    return Panel(Group(grid), title=title, title_align="left")


def _rows(summary: Summary) -> list[tuple[str, RenderableType]]:
    where = f"{summary.devices:,} × {summary.hardware}, {summary.engines:,} engine{'s' * (summary.engines != 1)}"
    rows: list[tuple[str, RenderableType]] = [
        ("model", Text(f"{summary.model}   {summary.placement} · {where}")),
        ("steps", f"{summary.steps:,} in {duration(summary.wall_s)} ({seconds(summary.wall_s)})"),
    ]
    if summary.step_s is not None:
        rows += [
            ("step", _spread(summary.step_s)),
            (
                "speed",
                f"{summary.trained_tokens_per_s:,.0f} tokens trained a second, {summary.tokens_per_device_s:,.0f} a device",
            ),
            ("bound by", Text(summary.bound, "bold")),
            ("phases", stacked(_coloured(summary.phases_s), BAR)),
            ("", _legend(summary.phases_s, summary.step_s.mean)),
        ]
    rows += _roles(summary)
    rows += [
        ("slots", f"{summary.slots_busy:.1%} busy while engines step"),
        ("sync", f"{seconds(summary.sync_s)} a step"),
        ("lengths", _lengths(summary.lengths)),
        ("dropped", f"prompts: {_reasons(summary.dropped)}; members: {_reasons(summary.members_dropped)}"),
        *([("stale", ", ".join(f"lag {lag} {share:.0%}" for lag, share in summary.staleness.items()))] * bool(summary.staleness)),
        *([("lost", Text(f"{summary.lost} times an engine", "bold red"))] * bool(summary.lost)),
    ]
    if (cost := summary.cost) is not None:
        rows.append(
            ("cost", f"{digits(cost.step)} a step, {digits(cost.run)} the run, {digits(cost.million_tokens)} a million tokens")
        )
    return [*rows, ("ended", Text(summary.ended, "bold red" if summary.failed else ""))]


def digits(value: float) -> str:
    """Four, and as many as it takes before the point."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def seconds(value: float) -> str:
    """Of so many digits."""
    return f"{digits(value)} s"


def _spread(step: Spread) -> str:
    return f"{seconds(step.median)} (median), mean {seconds(step.mean)}, 80 % from {seconds(step.p10)} to {seconds(step.p90)}"


def _coloured(phases: Mapping[str, float]) -> dict[str, float]:
    return {name if name in COLOURS else REST: spent for name, spent in phases.items()}


def _legend(phases: Mapping[str, float], step_s: float) -> Text:
    """Names, seconds and shares, in as many lines as it takes."""
    lines = [Text()]
    for name, spent in phases.items():
        if spent >= SHOWN / 10 * step_s:
            entry = Text.assemble(("■ ", COLOURS.get(name, COLOURS[REST])), f"{name} {seconds(spent)}, {spent / step_s:.0%}  ")
            if lines[-1] and len(lines[-1]) + len(entry) > ROOM:
                lines.append(Text())
            lines[-1].append_text(entry)
    return Text("\n").join(lines)


def _roles(summary: Summary) -> Iterator[tuple[str, str]]:
    """A line each; one where the same devices are both, which have the same numbers then."""
    told = {role: (share, summary.waits[role]) for role, share in summary.busy.items()}
    if TRAINER in told and all(each == told[TRAINER] for each in told.values()) and len(told) > 1:
        yield "devices", _busy(TRAINER, *told[TRAINER])
    else:
        yield from ((role, _busy(role, *each)) for role, each in told.items())


def _busy(role: str, share: float, waits: Mapping[str, float]) -> str:
    words = FOR | OF_TRAINER if role == TRAINER else FOR
    most = sorted(waits.items(), key=lambda item: -item[1])
    told = ", ".join(f"{words.get(cause, cause)} {waited:.1%}" for cause, waited in most if waited >= SHOWN)
    return f"{share:.1%} busy" + (f"; waits for {told}" if told else "")


def _lengths(lengths: Mapping[str, float | int | None]) -> str:
    mean, truncated = lengths["mean"], lengths["truncated_share"]
    if mean is None or truncated is None:
        return "-"
    spread = ", ".join(f"{name} {lengths[name]:,}" for name in ("p50", "p95", "max"))
    return f"mean {mean:,.1f}, {spread} tokens, {truncated:.1%} truncated"


def _reasons(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
