"""`bench tails`: what is done about long answers, and what it is worth: the wait for the last tenth of each batch.

Every row is a whole simulated run (`plan`), with engines that write slower the more run on them; weights take no time. Lengths
are lognormal and alike within a prompt. What is trained must be as long as what was admitted: a two-sample Kolmogorov-Smirnov
test compares them.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollyard import events as ev
from rollyard.bench.result import Machine, machine, versions
from rollyard.bench.turns import Tell
from rollyard.layers import resolve_tree
from rollyard.plan.engine import EngineModel
from rollyard.plan.scenario import Scenario
from rollyard.plan.simulate import Play
from rollyard.plan.stations import Prompts, judged
from rollyard.plan.step import Line, StepCost
from rollyard.plan.world import Stations
from rollyard.types import Completion, FinishReason, WeightVersion
from rollyard.types import Group as Judged

LAST = 0.1  # of the members of a batch
MEMBERS = 10_000  # trained, at least
HALVED = 0.5  # of the tail wait of plain routing, at most
UNBIASED = 0.01  # p, at least
SPARE = 0.25  # prompts beyond a batch, as a share of it
LEAST_STEPS = 6
STREAMED = 32  # steps between two moments at which an engine tells what it wrote
UNBOUNDED = 2**31  # tokens of a step, and pages: neither holds anybody up


@dataclass(frozen=True)
class Crowd:
    """One workload and the engines for it.

    The log of a length is normal: `between` of its variance lies between prompts, the rest between members of one prompt.
    A step of an engine writes one token for each that runs there and takes `step_s` + `each_s` for each of them; whatever an
    engine has to read, prompts and tokens written elsewhere, stops it for `read_s` a token.
    """

    engines: int = 8
    sigma: float = 1.0
    steps: int = 20
    slots: int = 32  # of an engine
    waves: int = 2  # members of a batch for each slot
    size: int = 8  # K
    median: int = 64  # tokens
    cap: int = 2048  # tokens
    between: float = 0.65
    prompt: int = 128  # tokens
    step_s: float = 0.004
    each_s: float = 0.0005
    read_s: float = 0.00005
    train_s: float = 1.0
    seed: int = 0

    @property
    def groups(self) -> int:
        """B: as many members as `waves` times the slots."""
        return self.waves * self.engines * self.slots // self.size

    @cached_property
    def _lengths(self) -> dict[tuple[int, int], int]:
        return {}

    def length(self, prompt: int, member: int) -> int:
        """Tokens of one completion."""
        if (prompt, member) not in self._lengths:
            own = math.sqrt(self.between) * random.Random(f"{self.seed}/{prompt}").gauss(0, 1)
            own += math.sqrt(1 - self.between) * random.Random(f"{self.seed}/{prompt}/{member}").gauss(0, 1)
            tokens = round(math.exp(math.log(self.median) + self.sigma * own))
            self._lengths[prompt, member] = min(max(tokens, 1), self.cap)
        return self._lengths[prompt, member]

    def settings(self) -> dict[str, object]:
        """For the record, but for what differs from row to row."""
        return {name: value for name, value in asdict(self).items() if name not in ("engines", "sigma", "steps", "waves")}


@dataclass(frozen=True, slots=True)
class Routing:
    """What is done about long answers; each field is an option of the config."""

    placement: Literal["colocated", "async"] = "colocated"
    staleness: int = 0
    spare: float = 0.0  # prompts beyond a batch, as a share of it
    order: Literal["admission", "longest"] = "admission"
    moves: int = 0
    on_stale: Literal["wait", "drop"] = "wait"


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
    run = Seen()
    play(crowd, routing, run)
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
        slots=run.slots_busy(crowd, routing),
        steps_per_s=crowd.steps / run.trained_at,
        members=len(trained),
        p=kolmogorov_smirnov(trained, admitted),
        staleness=sum(lag * count for lag, count in spans) / tokens,
        moved=run.moved,
        put_off=run.cut - run.moved if routing.placement == "colocated" else 0,
        read_again=run.read_again / tokens,
    )


@dataclass(slots=True)
class Batch:
    """A batch as it was trained."""

    began: float  # when the trainer wanted it
    groups: tuple[Judged, ...]


@dataclass(slots=True)
class Seen:
    """What came of one run."""

    batches: list[Batch] = field(default_factory=list)
    done: dict[tuple[int, int], float] = field(default_factory=dict)  # when each member was finished
    admitted: list[int] = field(default_factory=list)  # groups
    moved: int = 0
    cut: int = 0  # members, because they move or because a batch was full without them
    read_again: int = 0  # tokens
    trained_at: float = 0.0
    busy_slot_s: float = 0.0

    def hear(self, now: float, events: Sequence[ev.Event], instructions: Sequence[ev.Instruction]) -> None:
        """One step of the conductor."""
        for event in events:
            if isinstance(event, ev.SegmentArrived):
                self.cut += event.segment.finish is FinishReason.ABORT
            elif isinstance(event, ev.BatchTrained):
                self.trained_at = now
        for told in instructions:
            match told:
                case ev.Admit():
                    self.admitted.append(told.prompt.id)
                case ev.Generate() if told.request.written_ids:
                    self.read_again += len(told.request.prompt_ids) + len(told.request.written_ids)
                case ev.Move():
                    self.moved += 1
                case ev.Score():
                    self.done[told.completion.group, told.completion.member] = now
                case ev.Train():
                    self.batches.append(Batch(self.trained_at, told.groups))

    def slots_busy(self, crowd: Crowd, routing: Routing) -> float:
        """Share of the slots, over the time in which engines may write."""
        idle = crowd.train_s * len(self.batches) if routing.placement == "colocated" else 0.0
        return self.busy_slot_s / (crowd.engines * crowd.slots * (self.trained_at - idle))


@dataclass(frozen=True)
class Takes:
    """Seconds that things take (plan.world.Takes, plan.engine.EngineCosts) and tokens that they have (plan.workload.Lengths)."""

    crowd: Crowd
    copy_s: float = 0.0
    deliver_s: float = 0.0
    handoff_s: float = 0.0
    checkpoint_s: float = 0.0
    sent_bytes: int = 0

    def prepare_s(self, engine: ev.EngineId) -> float:
        return 0.0

    def probe_s(self, engine: ev.EngineId) -> float:
        return 0.0

    def sleep_s(self, engine: ev.EngineId) -> float:
        return 0.0

    def wake_s(self, engine: ev.EngineId) -> float:
        return 0.0

    def load_s(self, engine: ev.EngineId) -> float:
        return 0.0

    def start_s(self, engine: ev.EngineId) -> float:
        return 0.0

    def refuses(self, engine: ev.EngineId, version: WeightVersion) -> str:
        return ""

    def score_s(self, completion: Completion) -> float:
        return 0.0

    def train_s(self, groups: Sequence[Judged]) -> float:
        return self.crowd.train_s

    def step(self, running: int) -> StepCost:
        return StepCost(self.crowd.step_s + self.crowd.each_s * running, (Line(0.0, 0.0),))

    def prefill_s(self, tokens: int, pairs: int, beside: int = 1) -> float:
        return self.crowd.read_s * tokens

    def prompt(self, prompt_id: int) -> int:
        return self.crowd.prompt

    def completion(self, prompt_id: int, member: int, step: int) -> int:
        return self.crowd.length(prompt_id, member)


def play(crowd: Crowd, routing: Routing, seen: Seen) -> None:
    """A whole run."""
    takes = Takes(crowd)
    prompts, window = Prompts(takes), crowd.cap + crowd.prompt

    def make(name: ev.EngineId, spans: object) -> EngineModel:
        return EngineModel(
            name,
            crowd.slots,
            takes,
            prompts.length,
            pages=UNBOUNDED,
            step_tokens=UNBOUNDED,
            prefill_tokens=UNBOUNDED,
            window=window,
            share=False,
            tell_every=STREAMED,
        )

    stations = Stations(crowd.engines, make, takes, prompts, judged, 1, window)
    options = {
        "place.placement": routing.placement,
        "place.generate": crowd.engines,
        "engine.slots": crowd.slots,
        "rollout.group_size": crowd.size,
        "rollout.groups_per_step": crowd.groups,
        "rollout.max_tokens": crowd.cap,
        "rollout.max_staleness": routing.staleness,
        "rollout.oversample": round(routing.spare * crowd.groups),
        "rollout.order": routing.order,
        "rollout.moves": routing.moves,
        "rollout.on_stale": routing.on_stale,
        "weights.rollover": "keep" if routing.placement == "async" else "drain",
        "weights.probe": False,
        "weights.canary": False,
        "run.steps": crowd.steps,
    }
    config = resolve_tree(Scenario, lambda scenario: None, environment={}, overrides=options).config  # also what a run refuses
    run = Play(config, stations, heard=seen.hear)
    run.run()
    seen.busy_slot_s = sum(engine.busy_slot_s for engine in run.world.engines.stats())


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
