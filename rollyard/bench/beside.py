"""`bench load --workload areal`: orchestration beside AReaL's `WorkflowExecutor`, each with an engine that answers at once.

Microseconds a completion, in turns within one run. What each side does in them is in docs/benchmarks.md: it is not the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.bench.doubles import PROMPT_TOKENS
from rollyard.bench.instant import TOKENS
from rollyard.bench.load import RUNS, WARM, Case, ran
from rollyard.bench.peer import Peer, PeerError, find, running
from rollyard.bench.result import Figure, Load, Machine, Measured, Side, Spread, machine, ratios, versions
from rollyard.bench.turns import Tell, alternate

LIMIT_S = 900.0
SHORT = 4096  # completions of a warm-up


@dataclass(frozen=True, slots=True)
class Pair:
    """One size of groups. Values are microseconds a completion; `ratio` is how many times faster Rollyard is without journal."""

    size: int  # K
    completions: int  # of a round
    sides: tuple[Side, ...]  # without journal, with it, the peer
    ratios: tuple[float, ...]  # [rounds]
    ratio: Spread
    loads: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class Beside:
    """The whole benchmark."""

    bench: str
    workload: str
    unit: str
    pairs: tuple[Pair, ...]
    machine: Machine
    versions: Mapping[str, str]
    options: Mapping[str, object] = field(default_factory=dict)


class Own:
    """Whole runs of Rollyard."""

    def __init__(self, case: Case) -> None:
        self.name = "rollyard, journal" if case.journal else "rollyard"
        self._case = case

    async def warm_up(self) -> None:
        await ran(Case(self._case.size, self._case.groups, WARM))

    async def run(self, number: int) -> Measured:
        one = await ran(self._case)
        return _measured(one.seconds, one.cpu_s, self._case.completions)


class Executor:
    """AReaL's side."""

    def __init__(self, peer: Peer, case: Case) -> None:
        self.name = peer.name
        self._peer, self._case = peer, case

    async def warm_up(self) -> None:
        await self._run(SHORT)

    async def run(self, number: int) -> Measured:
        return await self._run(self._case.completions)

    async def _run(self, completions: int) -> Measured:
        case = self._case
        asked = {"episodes": completions // case.size, "size": case.size, "prompt": PROMPT_TOKENS, "tokens": TOKENS}
        answer = await self._peer.ask("run", LIMIT_S, **asked, concurrent=case.engines * case.slots)
        if answer["completions"] != completions:
            raise PeerError(f"peer {self.name} returned {answer['completions']} of {completions} completions")
        return _measured(answer["seconds"], answer["cpu_s"], completions)


async def bench(rounds: int, tell: Tell) -> Beside:
    """Raises PeerError, RunFailed, ConfigError where AReaL has no environment, TimeLimitExceeded."""
    async with running(find("areal")) as peer:
        loaded = await peer.ask("load", LIMIT_S)
        pairs = [await _pair(size, peer, loaded["versions"], rounds, tell) for size in (8, 1)]
    return Beside("load", "areal", "us", tuple(pairs), machine(), versions())


async def _pair(size: int, peer: Peer, theirs: Mapping[str, str], rounds: int, tell: Tell) -> Pair:
    without, kept = (next(case for case in RUNS if (case.size, case.journal) == (size, journal)) for journal in (False, True))
    tell(f"K {size}")
    found = await alternate((Own(without), Own(kept), Executor(peer, without)), rounds, tell)
    own, journal, other = found.sides()
    each = ratios("us", own.values, other.values)
    sides = (own, journal, Side.of(other.name, found.measured[2], versions=theirs))
    return Pair(size, without.completions, sides, each, Spread.of(each), found.loads)


def _measured(seconds: float, cpu_s: float, completions: int) -> Measured:
    return Measured(seconds / completions * 1e6, (Figure("CPU", cpu_s / completions * 1e6, "us"),))


def table(result: Beside) -> RenderableType:
    """A line for each side and size."""
    found = Table(box=None, pad_edge=False)
    for column in ("", "us a completion", "least", "most", "us of CPU", "completions/s"):
        found.add_column(column, justify="right" if column else "left")
    lines = []
    for pair in result.pairs:
        for side in pair.sides:
            spread, cpu = side.spread, side.figures[0].value
            cells = (f"{value:.1f}" for value in (spread.median, spread.least, spread.most, cpu))
            found.add_row(f"K {pair.size}, {side.name}", *cells, f"{1e6 / spread.median:,.0f}")
        ratio = pair.ratio
        lines.append(f"K {pair.size}: rollyard is {ratio.median:.2f} times as fast ({ratio.least:.2f} to {ratio.most:.2f})")
    title = Text("bench load: orchestration beside AReaL's WorkflowExecutor, with engines that answer at once", style="bold")
    return Group(title, found, *(Text(line, style="bold") for line in lines))
