"""A plan as it is read: tables, and one JSON object."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.plan.advise import UNSEEN, Choice, Plan
from rollyard.plan.outcome import FIXED, OVERLAPS
from rollyard.plan.show import digits
from rollyard.plan.space import Point


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything, choices with the options that they set."""
    found = asdict(plan)
    for shown, choice in zip(found["choices"], plan.choices, strict=True):
        shown["options"] = choice.point.options
        shown["devices"] = choice.point.devices
        shown["ran"]["forecast"] = choice.ran.forecast.model_dump()
    return found


def table(plan: Plan, gpus: str) -> RenderableType:
    """The best few, what they depend on, what was refused."""
    parts: list[RenderableType] = [Text(f"rollyard plan: {gpus}", style="bold"), _choices(plan)]
    if any(choice.shifts for choice in plan.choices):
        parts += [Text(), _shifts(plan)]
    parts += [Text(line, style="dim") for line in _notes(plan)]
    return Group(*parts)


def named(point: Point) -> str:
    """In a few words."""
    many = f" x {point.tensor_parallel} devices" if point.tensor_parallel > 1 else ""
    engines = 2 if point.placement == "swap" else point.engines
    words = [f"{point.placement}: {engines} engine{'s' * (engines > 1)}{many}, {point.slots} slots"]
    if point.apart:
        words.append(f"{point.train} to train")
    elif point.shard:
        words.append("one training state over all")
    if point.placement == "async":
        words.append(f"rollover {point.rollover}")
    if point.staleness:
        words.append(f"staleness {point.staleness}")
    if point.oversample:
        words.append(f"oversample {point.oversample}")
    return ", ".join(words)


def _choices(plan: Plan) -> Table:
    found = Table(box=None, pad_edge=False)
    priced = any(choice.cost for choice in plan.choices)
    found.add_column("")
    found.add_column("choice", overflow="fold")
    for column in ("step", "tokens/s", "generating", "training", "slots", *(("cost a step", "of 1,000") if priced else ())):
        found.add_column(column, justify="right")
    found.add_column("bound by")
    for number, choice in enumerate(plan.choices, 1):
        ran = choice.ran
        busy = [f"{ran.busy[role]:.0%}" if role in ran.busy else "-" for role in ("engine", "trainer")]
        money = (digits(choice.cost), digits(1000 * choice.cost)) if priced else ()
        name = named(choice.point) + (" (simulated only)" if choice.obstacle else "")
        rate = f"{ran.trained_tokens_per_s:,.0f}"
        found.add_row(str(number), name, seconds(ran.step_s), rate, *busy, f"{ran.slots:.0%}", *money, ran.bound)
    return found


def _shifts(plan: Plan) -> Table:
    """A line for each shift: what a step of each choice takes then, and which of them is best."""
    found = Table(box=None, pad_edge=False)
    found.add_column("and with")
    for number, _ in enumerate(plan.choices, 1):
        found.add_column(str(number), justify="right")
    found.add_column("best", justify="right")
    for place, shift in enumerate(plan.choices[0].shifts):
        cells = [_shifted(choice, place) for choice in plan.choices]
        found.add_row(shift.what, *cells, str(shift.first + 1))
    return found


def _shifted(choice: Choice, place: int) -> str:
    taken = choice.shifts[place].step_s
    if taken is None:
        return "the run fails"
    share = taken / choice.ran.step_s - 1
    return f"{seconds(taken)} ({share:+.0%})" if abs(share) >= UNSEEN else "the same"


def _notes(plan: Plan) -> Iterator[str]:
    refused = sum(each.count for each in plan.refused)
    yield ""
    yield (
        f"{plan.points:,} points: {refused:,} refused, {plan.simulated:,} simulated, {plan.excluded:,} ruled out by "
        f"their lower bound, {plan.left:,} left out by their estimate ({plan.runs:,} simulations in all)"
    )
    yield "tokens/s: those that are trained on, in a second of all of a step"
    if any(choice.point.placement in OVERLAPS for choice in plan.choices):
        yield "bound by, where engines and trainers work at once: the one that the other waits for longer"
    if any(FIXED in choice.ran.bound for choice in plan.choices):
        yield f"{FIXED}: kernels, scheduling, and what else takes as long for few tokens as for many"
    for each in plan.refused:
        near = f"; nearest that fits: {named(each.nearest)}" if each.nearest else ""
        yield f"refused {each.count:,} like {named(each.example)}: {each.problem}{near}"
    for kept in plan.kept:
        yield f"kept, since you gave it: {kept.name} = {kept.value}, which leaves out {kept.left_out:,} points"
    for number, choice in enumerate(plan.choices, 1):
        if choice.point.devices < plan.gpus:
            yield f"{number} uses {choice.point.devices:,} of {plan.gpus:,} devices"
        if choice.obstacle:
            yield f"{number} would be refused by `rollyard run`: {choice.obstacle}"


def seconds(value: float) -> str:
    """With three digits."""
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"
