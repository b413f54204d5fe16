"""What a simulated run came to, in a few numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import ceil
from statistics import median
from typing import Final, Protocol

from rollyard.errors import ConfigError
from rollyard.plan.costs import costs_of
from rollyard.plan.decoding import EngineCosts
from rollyard.plan.hardware import CPU
from rollyard.plan.scenario import Scenario
from rollyard.plan.trace import prompts_of
from rollyard.watch.accounts import ENGINE, TRAINER
from rollyard.watch.forecast import PHASES, StepMeans, counted
from rollyard.watch.report import Report, Usage
from rollyard.watch.timeline import BESIDE, PhaseSeconds
from rollyard.watch.trace import Traced

GENERATION: Final = "generation"
FIXED: Final = "fixed time of a decode step"
OF_STEP: Final = (FIXED, "memory bandwidth", "arithmetic")  # what a decode step is bound by
OVERLAPS: Final = ("async", "swap")  # placements in which generation and training go on at once
TAIL: Final = 0.5  # fewer of the slots that it could use at work on average: generation waits for its longest


class Outcome(Protocol):
    """A simulated run, as far as what it leaves and shows goes."""

    @property
    def report(self) -> Report: ...

    @property
    def metrics(self) -> Sequence[Mapping[str, object]]:
        """A row a step, as a run's metrics.jsonl has them."""
        ...

    @property
    def traced(self) -> Traced:
        """What every device did."""
        ...

    @property
    def lengths(self) -> Mapping[int, int]:
        """Completions that finished, by their tokens."""
        ...


@dataclass(frozen=True, slots=True)
class Spread:
    """Of the steps but the first, where there are others; percentiles by nearest rank."""

    mean: float
    median: float
    p10: float
    p90: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """At least one."""
        ordered = sorted(values)
        p10, p90 = (ordered[ceil(len(ordered) * share) - 1] for share in (0.1, 0.9))
        return cls(sum(ordered) / len(ordered), median(ordered), p10, p90, ordered[0], ordered[-1])


@dataclass(frozen=True, slots=True)
class Cost:
    """Money, at cluster.price a device and hour."""

    step: float
    run: float  # all steps, setup included
    million_tokens: float  # that were sampled


@dataclass(frozen=True, slots=True)
class Summary:
    """Seconds are those of a step, means over all steps but the first; shares are of the time after setup."""

    name: str
    model: str
    placement: str
    hardware: str
    devices: int  # that there were, whether they stayed or not
    engines: int
    steps: int
    wall_s: float
    step_s: Spread | None  # None: it did not come so far
    phases_s: Mapping[str, float]
    trained_tokens_per_s: float  # that are trained on
    tokens_per_device_s: float
    sync_s: float  # a step: weights on their way, and nothing else done that counts before it
    busy: Mapping[str, float]  # by role
    waits: Mapping[str, Mapping[str, float]]  # by role and cause
    slots_busy: float
    bound: str
    lengths: Mapping[str, float | int | None]
    dropped: Mapping[str, int]  # prompts, by reason
    members_dropped: Mapping[str, int]
    staleness: Mapping[int, float]  # share of the trained tokens, by lag
    lost: int  # engines that were lost, or started again
    ended: str
    failed: bool
    cost: Cost | None  # None: no price was given


def summarize(report: Report, metrics: Sequence[Mapping[str, object]], scenario: Scenario) -> Summary:
    """The few numbers, of the report and of a row a step."""
    means = means_of(metrics)
    later = [float(str(row["seconds"])) for row in metrics][1:] or [float(str(row["seconds"])) for row in metrics]
    there = report.usage.devices
    meanwhile = sum(device.wall_ns * device.devices for device in there) / (report.wall_s * 1e9) if report.wall_s else 0.0
    rate = means.get("trained_tokens_per_s", 0.0)
    trained = sum(report.staleness.values())
    return Summary(
        name=report.name,
        model=report.model,
        placement=report.placement,
        hardware=scenario.cluster.hardware,
        devices=sum(device.devices for device in there),
        engines=_engines(report),
        steps=report.steps,
        wall_s=report.wall_s,
        step_s=Spread.of(later) if later else None,
        phases_s={name: means[f"{name}_s"] for name in (*PHASES, "rest") if f"{name}_s" in means},
        trained_tokens_per_s=rate,
        tokens_per_device_s=rate / meanwhile if meanwhile else 0.0,
        sync_s=means.get("sync_s", 0.0),
        busy={pool.role: pool.busy_share for pool in report.usage.pools},
        waits={pool.role: pool.wait_share for pool in report.usage.pools},
        slots_busy=report.slots_busy,
        bound=bound(report, scenario),
        lengths=asdict(report.lengths),
        dropped=report.prompts.dropped,
        members_dropped=report.members.dropped,
        staleness={lag: tokens / trained for lag, tokens in report.staleness.items()},
        lost=len(report.lost),
        ended=report.finished.cause,
        failed=report.finished.failed,
        cost=_cost(report, means.get("step_s"), meanwhile, scenario.cluster.price),
    )


def means_of(metrics: Sequence[Mapping[str, object]]) -> Mapping[str, float]:
    """`step_s`, `generate_s`, ..., see StepMeans, of a row a step."""
    means = StepMeans()
    for row in metrics:
        means.add(_phases(row), int(str(row["train/tokens"])))
    return means.means()


def counting(done: Outcome, first: int) -> Report:
    """The report with phases and accounts of devices from the end of the step `first` to that of the last, which is later."""
    parts = [_phases(row) for row in done.metrics[first:]]
    phases = PhaseSeconds(*(sum(getattr(part, each.name) for part in parts) for each in fields(PhaseSeconds)))
    return replace(done.report, phases=phases, usage=Usage(*counted(done.traced, first)))


def _phases(row: Mapping[str, object]) -> PhaseSeconds:
    parts = {name.removeprefix("phase/"): float(str(value)) for name, value in row.items() if name.startswith("phase/")}
    beside = {name: float(str(row[name])) for name in BESIDE}
    return PhaseSeconds(wall_s=float(str(row["seconds"])), **parts, **beside)


def _engines(report: Report) -> int:
    """That there were, whether they stayed or not."""
    return sum(ENGINE in device.roles for device in report.usage.devices)


def _cost(report: Report, step_s: float | None, devices: float, price: float) -> Cost | None:
    """
    Args:
        devices: that there were at a time.
    """
    if not price or step_s is None:
        return None
    second = price * devices / 3600
    run = second * report.wall_s
    return Cost(second * step_s, run, run / report.generation_tokens * 1e6 if report.generation_tokens else 0.0)


def bound(report: Report, scenario: Scenario) -> str:
    """What a step waits for most: generation, the tail of generation, training, weight sync or scoring.

    Where generation and training go on at once it is the one that the other waits for longer, a sync included that waits for
    engines to finish what they hold. So of weight sync only what holds engines up counts. The tail: of the slots that
    requests could fill, fewer than TAIL are at work while engines generate or wait for each other. Of generation it says what
    decoding is bound by, where that is known without measuring. A run without a step says nothing.
    """
    if not report.steps:
        return "nothing"
    parts = report.phases.parts()
    spent = {GENERATION: parts["generate"], "training": parts["train"], "weight sync": parts["sync"], "scoring": parts["score"]}
    waits = {pool.role: pool.wait_share for pool in report.usage.pools}
    if report.placement in OVERLAPS:
        trainer = waits.get(TRAINER, {})
        engines, trainers = waits.get(ENGINE, {}).get("train", 0.0), trainer.get("generate", 0.0) + trainer.get("sync", 0.0)
        behind, before = (GENERATION, "training") if trainers >= engines else ("training", GENERATION)
        held_up = min(_stalled(report), spent["weight sync"])
        spent[behind] += spent.pop(before) + spent["weight sync"] - held_up
        spent["weight sync"] = held_up
    if not any(spent.values()):
        return "nothing"
    found = max(spent, key=lambda name: spent[name])
    return _generation(report, scenario) if found == GENERATION else found


def _stalled(report: Report) -> float:
    """Seconds for which a weight sync held up an engine, in the mean."""
    stalls = [device.stall_ns for device in report.usage.devices if ENGINE in device.roles]
    return sum(stalls) / len(stalls) / 1e9 if stalls else 0.0


def _generation(report: Report, scenario: Scenario) -> str:
    """What of it."""
    rollout, slots, engines = scenario.rollout, scenario.engine.slots, _engines(report)
    engine = _engine(scenario)
    length = prompts_of(scenario)[0] + (report.lengths.mean or 0.0) / 2  # that a running sequence attends to
    under_way = rollout.groups_per_step * rollout.group_size * (1 + rollout.max_staleness)
    could = min(slots, ceil(under_way / engines), *([] if engine is None else [max(1, int(engine.kv_tokens / length))]))
    engine_pools = [pool for pool in report.usage.pools if pool.role == ENGINE]
    causes = ("generate", "sync") if report.placement in OVERLAPS else ("generate",)  # others that generate, or finish that
    (busy, waits), *_ = [
        *((pool.busy_share, sum(pool.wait_share.get(each, 0.0) for each in causes)) for pool in engine_pools),
        (1.0, 0.0),
    ]
    running = report.slots_busy * slots
    if running / could * (busy / (busy + waits) if busy else 1.0) < TAIL:
        return f"the tail of {GENERATION}"
    if engine is None:
        return GENERATION
    cost = engine.step(max(1, round(running)))
    parts = [cost.floor_s, *(line.fixed + line.per_token * running * length for line in cost.lines)]
    return f"{GENERATION} ({OF_STEP[parts.index(max(parts))]})"


def _engine(scenario: Scenario) -> EngineCosts | None:
    """None for a machine that would be measured, and for a model that is not there any more."""
    if scenario.cluster.hardware == CPU:
        return None
    try:
        return costs_of(scenario).engine
    except ConfigError:
        return None
