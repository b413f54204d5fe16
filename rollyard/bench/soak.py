"""`bench load --workload soak`: 100,000 rollouts, one in a hundred of which fails, with stations that answer at once.

Nothing may be lost, and memory may not grow: what is resident, and what Python holds, in the first half and in the second.
"""

from __future__ import annotations

import gc
import os
import sqlite3
import tempfile
import time
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.bench.instant import Flight, instant_stations
from rollyard.bench.load import WARM, Case, config_of
from rollyard.bench.memory import resident
from rollyard.bench.result import Load, Machine, machine, versions
from rollyard.bench.turns import Tell
from rollyard.errors import RollyardError
from rollyard.journal.journal import Journal
from rollyard.loop import Run
from rollyard.types import Request
from rollyard.watch.report import Report

FAILING: Final = 100  # one request in so many fails
MIX: Final = ("error", "error", "refusal", "refusal", "refusal", "death")  # how, in turn by chance
ROLLOUTS: Final = 100_000
GROWTH: Final = 0.10  # of memory from the first half to the second, at most
TABLES: Final = {  # what is counted in the journal
    **{name: name for name in ("prompts", "completions", "verdicts", "drops", "batches", "batch_groups")},
    "trained": "rollouts WHERE trained_step IS NOT NULL",
}
SIZE, GROUPS = 8, 125  # a thousand rollouts a step


class LostError(RollyardError):
    """Something is missing, or is there twice."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Memory after so many rollouts were trained."""

    rollouts: int
    resident: int  # bytes
    traced: int  # bytes that Python holds


@dataclass(frozen=True, slots=True)
class Soak:
    """What came of it. All that was admitted was trained or dropped, and the journal says the same."""

    bench: str
    workload: str
    rollouts: int  # that were trained
    seconds: float
    failures: Mapping[str, int]  # of requests, by kind
    lost_engines: int  # that died, and were started again
    members: Mapping[str, object]  # the ledger
    journal: Mapping[str, int]  # rows, by table
    marks: tuple[Mark, ...]
    growth: float  # of resident memory, from the least mark of the first half to that of the second
    traced_growth: float  # of what Python holds
    load: Load
    machine: Machine
    versions: Mapping[str, str]
    options: Mapping[str, object]


async def bench(tell: Tell, rollouts: int = ROLLOUTS, *, traced: bool = True) -> Soak:
    """One run.

    Args:
        rollouts: that are trained, a multiple of ten thousand.
        traced: also say what Python holds, which makes it several times as slow.

    Raises:
        LostError: the books do not agree.
        RunFailed: the run did not end as planned.
    """
    before, began = os.getloadavg()[0], time.perf_counter()
    steps = rollouts // (SIZE * GROUPS)
    case = Case(SIZE, GROUPS, steps - WARM, engines=8, slots=64, staleness=2, journal=True)
    failures: dict[str, int] = {}
    every = max(steps // 10, 1)
    marks = []
    if traced:
        tracemalloc.start()
    with tempfile.TemporaryDirectory(prefix="rollyard-soak-") as scratch:
        stations = instant_stations(case.engines, case.slots, Flight(), fate=lambda request: fate(request, failures))
        config = config_of(case, Path(scratch), {"place.restarts": 1_000_000, "rollout.retries": 3})
        journals: list[Journal] = []

        def opening(*given: Any, **named: Any) -> Journal:
            journals.append(Journal(*given, **named))
            return journals[0]

        run = Run(config, stations=lambda past: stations, journal=opening)
        async for step in run:
            if step.step % every == 0:
                journals[0].flush()  # what waits to be written comes and goes, and is no growth
                marks.append(mark := _mark(step.step * SIZE * GROUPS))
                tell(f"{mark.rollouts:,} rollouts: {mark.resident / 2**20:.1f} MiB, {mark.traced / 2**20:.1f} traced")
        assert run.report is not None
        rows = counted(run.folder.journal)
        check(run.report, rows)
    if traced:
        tracemalloc.stop()
    return Soak(
        bench="load",
        workload="soak",
        rollouts=run.report.members.trained,
        seconds=time.perf_counter() - began,
        failures=failures,
        lost_engines=len(run.report.lost) // 2,
        members=asdict(run.report.members),
        journal=rows,
        marks=tuple(marks),
        growth=_growth([mark.resident for mark in marks]),
        traced_growth=_growth([mark.traced for mark in marks]) if traced else 0.0,
        load=Load(before, os.getloadavg()[0]),
        machine=machine(),
        versions=versions(),
        options={} if rollouts == ROLLOUTS else {"rollouts": rollouts},
    )


def fate(request: Request, failures: dict[str, int]) -> str:
    """What becomes of this attempt: it belongs to its id alone. Counted once, however often it is asked for."""
    drawn = int.from_bytes(blake2b(repr(tuple(request.id)).encode(), digest_size=8).digest(), "little")
    if drawn % FAILING:
        return ""
    kind = MIX[drawn // FAILING % len(MIX)]
    failures[kind] = failures.get(kind, 0) + 1
    return kind


def counted(journal: Path) -> dict[str, int]:
    """Rows of a journal, by table."""
    connection = sqlite3.connect(journal)
    try:
        return {name: connection.execute(f"SELECT count(*) FROM {rows}").fetchone()[0] for name, rows in TABLES.items()}
    finally:
        connection.close()


def check(report: Report, rows: Mapping[str, int]) -> None:
    """Raises LostError unless all that came is where it must be, in the report and in the journal."""
    prompts, members, tokens = report.prompts, report.members, report.tokens
    dropped = {"prompts": sum(prompts.dropped.values()), "members": sum(members.dropped.values())}
    equal = {
        "prompts that were admitted": (prompts.admitted, prompts.trained + dropped["prompts"]),
        "members that were admitted": (members.admitted, members.trained + dropped["members"]),
        "tokens that came": (tokens.generated, tokens.trained + sum(tokens.dropped.values()) + tokens.live),
        "prompts in the journal": (rows["prompts"], prompts.admitted),
        "batches in the journal": (rows["batches"], report.steps),
        "groups of batches in the journal": (rows["batch_groups"], prompts.trained),
        "drops in the journal": (rows["drops"], dropped["prompts"] + dropped["members"]),
        "completions in the journal that were trained": (rows["trained"], members.trained),
    }
    wrong = [f"{what}: {found:,} against {expected:,}" for what, (found, expected) in equal.items() if found != expected]
    if wrong:
        raise LostError("; ".join(wrong))


def _mark(rollouts: int) -> Mark:
    gc.collect()
    return Mark(rollouts, resident(os.getpid()), tracemalloc.get_traced_memory()[0])


def _growth(held: Sequence[int]) -> float:
    """From the least of the first half to that of the second: what is held and let go again is no growth."""
    half = len(held) // 2
    return min(held[half:]) / min(held[:half]) - 1


# ------------------------------------------------------------------------------------------------ as it is read


def table(result: Soak) -> RenderableType:
    """Memory as it went, and the books."""
    found = Table(box=None, pad_edge=False)
    for column in ("rollouts", "resident", "Python"):
        found.add_column(column, justify="right")
    for mark in result.marks:
        found.add_row(f"{mark.rollouts:,}", f"{mark.resident / 2**20:.1f} MiB", f"{mark.traced / 2**20:.1f} MiB")
    title = Text(f"bench load: soak, {result.rollouts:,} rollouts in {result.seconds:.0f} s", style="bold")
    failures = ", ".join(f"{count:,} {kind}" for kind, count in sorted(result.failures.items()))
    rows = ", ".join(f"{count:,} {name}" for name, count in result.journal.items())
    growth = f"from half to half resident memory grew by {result.growth:.1%}, what Python holds by {result.traced_growth:.1%}"
    lines = (growth, f"failures: {failures}; {result.lost_engines} engines lost", f"journal: {rows}", "nothing lost")
    return Group(title, found, *(Text(line, style="dim") for line in lines))
