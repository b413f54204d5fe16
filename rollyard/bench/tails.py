"""`bench tails`: what is done about long answers, and what it is worth: the wait for the last tenth of each batch.

Every row is a whole run under the real conductor, with engines that only take time (`crowd`). Lengths are lognormal and alike
within a prompt. What is trained must be as long as what was admitted: a two-sample Kolmogorov-Smirnov test compares them.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.bench.crowd import Batch, Crowd, Routing, Simulation
from rollyard.bench.result import Machine, machine, versions
from rollyard.bench.turns import Tell

LAST = 0.1  # of the members of a batch
MEMBERS = 10_000  # trained, at least
HALVED = 0.5  # of the tail wait of plain routing, at most
UNBIASED = 0.01  # p, at least
SPARE = 0.25  # prompts beyond a batch, as a share of it
LEAST_STEPS = 6

CASES = (  # engines, spread of the log of lengths, members of a batch for each slot
    Crowd(8, 1.0, waves=2),
    Crowd(8, 1.3, waves=2),
    Crowd(8, 1.0, waves=8),
    Crowd(8, 1.3, waves=8),
    Crowd(64, 1.0, waves=2),
    Crowd(64, 1.3, waves=2),
)

ROUTINGS = {
    "plain": Routing(),
    "longest first": Routing(order="longest"),
    "moving": Routing(moves=3),
    "tails put off, S 1": Routing(staleness=1, spare=SPARE),
    "tails put off, S 2": Routing(staleness=2, spare=SPARE),
    "all together, S 2": Routing(staleness=2, spare=SPARE, order="longest", moves=3),
    "async, S 2": Routing("async", staleness=2),
    "async, S 2, prompts to spare": Routing("async", staleness=2, spare=SPARE),
    "async, S 2, all together": Routing("async", staleness=2, spare=SPARE, order="longest", moves=3),
}


@dataclass(frozen=True, slots=True)
class Tail:
    """One run."""

    routing: str
    engines: int
    waves: int
    sigma: float
    tail_s: float  # from nine tenths of a batch's members to all of them, mean over batches
    of_plain: float  # that, over what plain routing of the placement has
    slots: float  # share in use while engines may write
    steps_per_s: float
    members: int  # trained
    p: float  # that members trained and admitted are of the same lengths
    staleness: float  # versions a trained token lags behind, on average
    moved: int
    put_off: int
    read_again: float  # tokens, over those trained


@dataclass(frozen=True, slots=True)
class Tails:
    """The whole benchmark."""

    bench: str
    work: Mapping[str, object]
    rows: tuple[Tail, ...]
    seconds: float  # of real time
    machine: Machine
    versions: Mapping[str, str]
    options: Mapping[str, object]  # that are not the default


def bench(tell: Tell, cases: Sequence[Crowd] = CASES) -> Tails:
    """Every routing in every case."""
    began, rows, options = time.perf_counter(), [], {} if tuple(cases) == CASES else {"engines": cases[0].engines}
    for case in cases:
        crowd, plain = sized(case, MEMBERS), dict[str, float]()
        for name, routing in ROUTINGS.items():
            one = tail(name, crowd, routing, plain.get(routing.placement))
            plain.setdefault(routing.placement, one.tail_s)
            tell(f"{shown(one)}, {name}: tail {one.tail_s:.2f} s, {one.of_plain:.0%} of plain, p {one.p:.2g}")
            rows.append(one)
    return Tails("tails", cases[0].settings(), tuple(rows), time.perf_counter() - began, machine(), versions(), options)


def sized(crowd: Crowd, members: int) -> Crowd:
    """With as many steps as train so many members, or a few more."""
    return replace(crowd, steps=max(LEAST_STEPS, -(-members // (crowd.groups * crowd.size))))


def tail(name: str, crowd: Crowd, routing: Routing, plain_s: float | None = None) -> Tail:
    """One run; `plain_s` is the tail wait that it is compared with."""
    run = Simulation(crowd, routing)
    run.run()
    waits = [wait(batch, run.done) for batch in run.batches]
    tail_s = statistics.fmean(waits)
    spans = [
        (step - span.version.step, span.tokens)
        for step, batch in enumerate(run.batches)
        for group in batch.groups
        for rollout in group.rollouts
        for span in rollout.completion.spans
    ]
    tokens = sum(count for _, count in spans)
    trained = [crowd.length(group.id, member) for batch in run.batches for group in batch.groups for member in range(crowd.size)]
    admitted = [crowd.length(group, member) for group in run.admitted for member in range(crowd.size)]
    return Tail(
        routing=name,
        engines=crowd.engines,
        waves=crowd.waves,
        sigma=crowd.sigma,
        tail_s=tail_s,
        of_plain=tail_s / plain_s if plain_s else 1.0,
        slots=run.slots_busy,
        steps_per_s=crowd.steps / run.trained_at,
        members=len(trained),
        p=kolmogorov_smirnov(trained, admitted),
        staleness=sum(lag * count for lag, count in spans) / tokens,
        moved=run.moved,
        put_off=run.put_off,
        read_again=run.read_again / tokens,
    )


def wait(batch: Batch, done: Mapping[tuple[int, int], float]) -> float:
    """Seconds from nine tenths of the batch's members to all, as far as the batch was wanted by then."""
    ends = sorted(
        done[rollout.completion.group, rollout.completion.member] for group in batch.groups for rollout in group.rollouts
    )
    most = ends[math.ceil((1 - LAST) * len(ends)) - 1]
    return max(ends[-1], batch.began) - max(most, batch.began)


def kolmogorov_smirnov(first: Sequence[float], second: Sequence[float]) -> float:
    """The p-value of the two-sample test: that two samples are of one distribution (asymptotic, two-sided)."""
    one, two = sorted(first), sorted(second)
    gap = max(abs(bisect_right(one, at) / len(one) - bisect_right(two, at) / len(two)) for at in {*one, *two})
    scaled = gap * math.sqrt(len(one) * len(two) / (len(one) + len(two)))
    if scaled < 0.2:  # the series below needs more terms the smaller this is; here p is 1 to twelve digits
        return 1.0
    series = (math.exp(-2 * k * k * scaled * scaled) * (1 if k % 2 else -1) for k in range(1, 101))
    return min(max(2 * math.fsum(series), 0.0), 1.0)


# ------------------------------------------------------------------------------------------------ as it is read


def shown(one: Tail) -> str:
    """The case in words."""
    return f"{one.engines} engines, {one.waves} members a slot, sigma {one.sigma:g}"


def table(result: Tails) -> RenderableType:
    """A line for each run."""
    found = Table(box=None, pad_edge=False)
    columns = ("tail wait", "of plain", "slots", "steps/s", "members", "p", "lag", "moved", "put off", "read again")
    found.add_column("case")
    found.add_column("routing")
    for column in columns:
        found.add_column(column, justify="right")
    for one in result.rows:
        found.add_row(shown(one), one.routing, *cells(one))
    title = Text("bench tails: long answers, on a virtual clock", style="bold")
    return Group(title, found, Text(about(result.work), style="dim"))


def cells(one: Tail) -> list[str]:
    """Its figures."""
    return [
        f"{one.tail_s:.2f} s",
        f"{one.of_plain:.0%}",
        f"{one.slots:.0%}",
        f"{one.steps_per_s:.3g}",
        f"{one.members:,}",
        f"{one.p:.2g}",
        f"{one.staleness:.2f}",
        f"{one.moved:,}",
        f"{one.put_off:,}",
        f"{one.read_again:.0%}",
    ]


def about(work: Mapping[str, object]) -> str:
    """What all runs have in common."""
    return (
        f"{work['slots']} slots an engine, K {work['size']}, {SPARE:.0%} prompts to spare; lengths lognormal, "
        f"median {work['median']}, at most {work['cap']} tokens, {work['between']} of the variance between prompts; a step "
        f"takes {work['step_s']} s + {work['each_s']} s for each that runs, reading {work['read_s']} s a token, prompts have "
        f"{work['prompt']} tokens; training {work['train_s']} s"
    )
