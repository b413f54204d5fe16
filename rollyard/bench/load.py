"""`bench load`: what orchestration costs, with stations that answer at once.

Whole runs, through loop, conductor, controller, advantages, packing and report, with and without the journal; the core alone, fed
with events prepared before; and many requests in flight over many engines. Beside AReaL's executor with a fake engine, in turns.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.bench import prepared
from rollyard.bench.instant import Flight, instant_stations
from rollyard.bench.journal import Written, measure
from rollyard.bench.placements import SHAPE
from rollyard.bench.result import Load, Machine, Spread, machine, versions
from rollyard.bench.turns import Tell
from rollyard.config import Config
from rollyard.journal.journal import Journal
from rollyard.journal.record import Unkept
from rollyard.layers import resolve
from rollyard.loop import Run

WARM: Final = 2  # steps that are not measured


@dataclass(frozen=True, slots=True)
class Case:
    """A run of so many engines that answer at once."""

    size: int  # K
    groups: int  # of a batch
    steps: int  # that are measured
    engines: int = 4
    slots: int = 64
    staleness: int = 1
    journal: bool = False
    hold: bool = False  # engines keep what they have until they are full

    @property
    def completions(self) -> int:
        return self.steps * self.groups * self.size


RUNS: Final = tuple(Case(size, 512 // size, 40, journal=journal) for size in (8, 1) for journal in (False, True))
FLIGHT: Final = Case(8, 640, 8, engines=64, slots=168, staleness=7, hold=True)  # 10,752 slots
CORE: Final = (
    prepared.Play(live=100, size=8, steps=40),
    *(prepared.Play(live=live, size=1, steps=20_000 // live) for live in (100, 1_000, 10_000)),
)


@dataclass(frozen=True, slots=True)
class Rate:
    """Completions a second of whole runs."""

    size: int
    journal: bool
    completions: int  # of a round
    per_s: Spread
    us: float  # of wall time for a completion, in the middle round
    cpu_us: float  # of processor time, in the middle round
    in_flight: float  # requests that engines hold, on average; 0 where they hold none
    most_in_flight: int


@dataclass(frozen=True, slots=True)
class CoreRate:
    """Events a second of the conductor alone."""

    size: int
    live: int  # groups
    events: int
    per_s: Spread
    us: float  # of an event, in the middle round


@dataclass(frozen=True, slots=True)
class Loads:
    """The whole benchmark."""

    bench: str
    workload: str
    runs: tuple[Rate, ...]
    flight: tuple[Rate, ...]
    core: tuple[CoreRate, ...]
    rounds: int
    load: Load
    machine: Machine
    versions: Mapping[str, str]
    options: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ran:
    """What one run took, its first steps left out."""

    seconds: float
    cpu_s: float
    flight: Flight


@dataclass(frozen=True, slots=True)
class Kept:
    """What the journal took of members that came at a steady rate, and how fast it is read back."""

    bench: str
    workload: str
    rounds: tuple[Written, ...]
    load: Load
    machine: Machine
    versions: Mapping[str, str]
    options: Mapping[str, object] = field(default_factory=dict)


def kept(rounds: int, tell: Tell) -> Kept:
    """Members come as fast as 10,000 a second for some seconds, so many times."""
    before, found = os.getloadavg()[0], list[Written]()
    for number in range(1, rounds + 1):
        found.append(measure())
        tell(f"round {number}/{rounds}: {found[-1].per_s:,.0f} members/s, {found[-1].cpu_us:.1f} us of CPU each")
    return Kept("load", "journal", tuple(found), Load(before, os.getloadavg()[0]), machine(), versions())


async def bench(rounds: int, tell: Tell) -> Loads:
    """Raises RunFailed for a run that did not end as planned."""
    before = os.getloadavg()[0]
    await ran(replace(RUNS[0], steps=WARM))  # what is loaded late
    found: dict[Case, list[Ran]] = {case: [] for case in (*RUNS, FLIGHT)}
    core: dict[prepared.Play, list[float]] = {play: [] for play in CORE}
    events = {play: prepared.World(play).prepare() for play in CORE}
    for number in range(1, rounds + 1):
        for case, runs in found.items():
            runs.append(await ran(case))
            per_s = case.completions / runs[-1].seconds
            tell(f"round {number}/{rounds}, {shown(case)}: {per_s:,.0f} completions/s")
        for play, seconds in core.items():
            seconds.append(prepared.fed(play, events[play]))
            per_s = len(events[play]) / seconds[-1]
            tell(f"round {number}/{rounds}, core, K {play.size}, {play.live:,} live groups: {per_s:,.0f} events/s")
    return Loads(
        bench="load",
        workload="speed",
        runs=tuple(_rate(case, found[case]) for case in RUNS),
        flight=(_rate(FLIGHT, found[FLIGHT]),),
        core=tuple(_core_rate(play, len(events[play]), seconds) for play, seconds in core.items()),
        rounds=rounds,
        load=Load(before, os.getloadavg()[0]),
        machine=machine(),
        versions=versions(),
    )


def shown(case: Case) -> str:
    """A case in words."""
    journal = "with journal" if case.journal else "no journal"
    return f"K {case.size}, {case.engines} engines, {journal}"


async def ran(case: Case) -> Ran:
    """One run. Raises RunFailed."""
    flight, marks = Flight(), list[tuple[float, float]]()
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as scratch:
        stations = instant_stations(case.engines, case.slots, flight, hold=case.hold)
        run = Run(config_of(case, Path(scratch)), stations=lambda past: stations, journal=Journal if case.journal else Unkept)
        async for step in run:
            if step.step in (WARM, WARM + case.steps):
                marks.append((time.perf_counter(), time.process_time()))
    (began, cpu), (ended, cpu_ended) = marks
    return Ran(ended - began, cpu_ended - cpu, flight)


def config_of(case: Case, scratch: Path, more: Mapping[str, object] | None = None) -> Config:
    """The run's config, with further options."""
    model = scratch / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    options: dict[str, object] = {
        "model.path": str(model),
        "prompts.task": "sort",  # a config must name prompts; doubles bring their own
        "place.placement": "async",
        "place.device": "cpu",
        "advantage.kind": "grpo" if case.size > 1 else "reinforce++",
        "rollout.groups_per_step": case.groups,
        "rollout.group_size": case.size,
        "rollout.min_scored": min(case.size, 2),
        "rollout.max_tokens": 16,
        "rollout.max_staleness": case.staleness,
        "weights.rollover": "keep",
        "weights.canary": False,
        "weights.probe": False,
        "run.steps": WARM + case.steps,
        "run.out": str(scratch / "run"),
        "watch.view": "quiet",
        **(more or {}),
    }
    return resolve(environment={}, overrides=options).config


def _rate(case: Case, rounds: Sequence[Ran]) -> Rate:
    middle = sorted(rounds, key=lambda one: one.seconds)[len(rounds) // 2]
    return Rate(
        size=case.size,
        journal=case.journal,
        completions=case.completions,
        per_s=Spread.of([case.completions / one.seconds for one in rounds]),
        us=middle.seconds / case.completions * 1e6,
        cpu_us=middle.cpu_s / case.completions * 1e6,
        in_flight=middle.flight.mean if case.hold else 0.0,
        most_in_flight=middle.flight.most if case.hold else 0,
    )


def _core_rate(play: prepared.Play, events: int, rounds: Sequence[float]) -> CoreRate:
    per_s = Spread.of([events / seconds for seconds in rounds])
    return CoreRate(play.size, play.live, events, per_s, 1e6 / per_s.median)


# ------------------------------------------------------------------------------------------------ as it is read


def table(result: Loads) -> RenderableType:
    """A line for each case."""
    found = Table(box=None, pad_edge=False)
    found.add_column("")
    for column in ("a second", "least", "most", "us each", "us of CPU", "in flight"):
        found.add_column(column, justify="right")
    for run in (*result.runs, *result.flight):
        journal = "journal" if run.journal else "no journal"
        held = f"{run.in_flight:,.0f}" if run.in_flight else ""
        cells = (*_spread(run.per_s), f"{run.us:.1f}", f"{run.cpu_us:.1f}", held)
        found.add_row(f"completions, K {run.size}, {journal}", *cells)
    for core in result.core:
        found.add_row(f"events of the core, K {core.size}, {core.live:,} live groups", *_spread(core.per_s), f"{core.us:.1f}")
    title = Text(f"bench load: stations that answer at once, median of {result.rounds} rounds", style="bold")
    load, where = result.load, result.machine
    about = f"load average {load.before:.2f} to {load.after:.2f}; {where.cpu}, {where.cores} cores"
    return Group(title, found, Text(about, style="dim"))


def _spread(found: Spread) -> tuple[str, str, str]:
    return f"{found.median:,.0f}", f"{found.least:,.0f}", f"{found.most:,.0f}"


def kept_table(result: Kept) -> RenderableType:
    """A line for each round."""
    found = Table(box=None, pad_edge=False)
    for column in ("members/s", "us of CPU each", "longest step", "bytes each", "read back"):
        found.add_column(column, justify="right")
    for one in result.rounds:
        read = f"{one.read:,} in {one.read_s:.1f} s"
        longest = f"{one.longest_s * 1e3:.1f} ms"
        found.add_row(f"{one.per_s:,.0f}", f"{one.cpu_us:.1f}", longest, f"{one.size / one.members:,.0f}", read)
    title = Text(f"bench load: members in the journal, of {result.rounds[0].tokens} tokens", style="bold")
    return Group(title, found)
