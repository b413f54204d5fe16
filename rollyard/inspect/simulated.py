"""The folder of a run that was simulated: it has no journal, since nothing was written or judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from rollyard.errors import ConfigError
from rollyard.inspect.source import Lives, read_metrics
from rollyard.journal.folder import RunFolder
from rollyard.layers import resolve_tree
from rollyard.plan.outcome import Summary, summarize
from rollyard.plan.scenario import Scenario
from rollyard.watch.read import read_report

PHASES = ("generate", "score", "train", "sync", "checkpoint", "unaccounted")  # columns


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step, as the metrics have it."""

    step: int
    groups: int
    tokens: int
    tokens_per_s: float | None  # of generation
    longest: int | None  # tokens of the longest completion
    dropped: int
    seconds: float
    phases: Mapping[str, float]  # seconds by phase


def refuse(given: str, folder: RunFolder) -> None:
    """Raises ConfigError: what was asked for is in a journal."""
    problem = f"{given} needs a journal, and a simulated run has none: nothing was written or judged in it"
    remedy = "leave it out, or give `steps` or --timeline; report.json, metrics.jsonl and trace.json are all that there is"
    raise ConfigError(problem, where=str(folder.path), remedy=remedy)


def overview(folder: RunFolder) -> Summary:
    """What `rollyard simulate` said. Raises ConfigError, JournalError, OSError where a file of it is damaged, or not there."""
    scenario = resolve_tree(Scenario, lambda _: None, file=folder.scenario, environment={}).config
    return summarize(read_report(folder.report), read_metrics(folder, Lives()).lines, scenario)


def steps(folder: RunFolder, limit: int) -> tuple[tuple[SimulatedStep, ...], int]:
    """The newest steps, oldest first (0: all), and how many there are. Raises OSError."""
    lines = read_metrics(folder, Lives()).lines
    return tuple(_step(line) for line in lines[-limit if limit else 0 :]), len(lines)


def _step(line: Mapping[str, Any]) -> SimulatedStep:
    return SimulatedStep(
        step=line["step"],
        groups=line["groups"],
        tokens=line["tokens"],
        tokens_per_s=line["tokens_per_s"],
        longest=line["completion_tokens_max"],
        dropped=line["dropped"],
        seconds=line["seconds"],
        phases={name: line[f"phase/{name}_s"] for name in PHASES},
    )


def table(rows: Sequence[SimulatedStep]) -> RenderableType:
    """One row a step."""
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("step", "groups", "tokens", "tokens/s", "longest", "dropped", "seconds", *PHASES):
        shown.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        counts = (f"{count:,}" for count in (row.step, row.groups, row.tokens))
        speed, longest = _whole(row.tokens_per_s), _whole(row.longest)
        spent = (f"{value:,.2f}" for value in (row.seconds, *row.phases.values()))
        shown.add_row(*counts, speed, longest, f"{row.dropped:,}", *spent)
    return shown


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{round(value):,}"
