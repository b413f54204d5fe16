"""A result as people read it in a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.bench.result import Agreement, Result, Side

APPROACHES = {  # transport: what it asks for, and when to use it
    "in_place": ("nothing: one process", "placement colocated"),
    "shared_memory": ("nothing: memory without a name", "engines on the trainer's machine"),
    "broadcast": ("a port of the trainer's machine, a group for each set of engines", "engines on other machines"),
    "checkpoint": ("a disk that both see", "anything that reads a folder"),
}


def table(result: Result) -> RenderableType:
    """The sides, their figures, the ratio, and on what it was measured."""
    sides = Table(box=None, pad_edge=False)
    for column in ("", result.unit, "least", "most"):
        sides.add_column(column, justify="left" if not column else "right")
    for side in result.sides:
        spread = side.spread
        sides.add_row(f"[bold]{side.name}[/]", f"[bold]{spread.median:.4g}[/]", f"{spread.least:.4g}", f"{spread.most:.4g}")
    title = f"bench {result.bench} {result.workload}: {result.model}, {result.dtype}, {result.threads} threads"
    ratio = result.ratio
    first, second = (side.name for side in result.sides[:2])
    verdict = f"{first} is {ratio.median:.2f} times as fast as {second}"
    ends = f"({ratio.least:.2f} to {ratio.most:.2f}, {len(result.ratios)} rounds)"
    approaches = [_approaches(result)] if (result.bench, result.workload) == ("sync", "idle") else []
    return Group(Text(title, style="bold"), sides, Text(f"{verdict} {ends}", style="bold"), *approaches, *_details(result))


def _approaches(result: Result) -> Table:
    """The transports as one chooses among them."""
    shown = Table(box=None, pad_edge=False)
    for column in ("approach", "latency, ms", "bytes moved", "complexity", "when to use"):
        shown.add_column(column, justify="right" if column in ("latency, ms", "bytes moved") else "left")
    for side in result.sides:
        if side.name in APPROACHES:
            moved = next(figure.value for figure in side.figures if figure.name == "bytes")
            shown.add_row(side.name, f"{side.spread.median:.0f}", f"{moved:,.0f}", *APPROACHES[side.name])
    return shown


def _details(result: Result) -> list[Text]:
    loads = [load for pair in result.loads for load in (pair.before, pair.after)]
    machine = result.machine
    lines = [_figures(side) for side in result.sides if side.figures]
    if result.agreement is not None:
        lines.append(_agreement(result.agreement))
    lines.append(f"load average {min(loads):.2f} to {max(loads):.2f}; {_versions(result.versions)}")
    lines += [f"{side.name}: {_versions(side.versions)}" for side in result.sides if side.versions]
    lines.append(
        f"{machine.cpu}, {machine.cores} cores ({' '.join(machine.features)}), {machine.memory_gib} GiB, {machine.system}"
    )
    if result.options:
        lines.append("options: " + ", ".join(f"{name}={value}" for name, value in result.options.items()))
    return [Text(line, style="dim") for line in lines]


def _figures(side: Side) -> str:
    shown = (f"{figure.name} {figure.value:.4g} {figure.unit}".rstrip() for figure in side.figures)
    return f"{side.name}: {', '.join(shown)}"


def _agreement(agreement: Agreement) -> str:
    text = f"greedy tokens: {agreement.agreed} of {agreement.tokens} alike up to the first difference"
    for one in agreement.differences:
        text += f"; prompt {one.prompt} differs from token {one.token}, {one.gap:.1g} nats apart"
    return text


def _versions(found: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items())
