"""`bench placements` as people read it in a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.bench.placements import Doubled, Expected, Placements
from rollyard.bench.real import Real

CONVENTION = (
    "every placement has all devices. separate, async: the pools as given. colocated: all devices generate, then all train, "
    "in so much less time. swap: each half has half of all slots, or trains on half of all devices"
)


def table(result: Placements) -> RenderableType:
    """A table of the runs with doubles, one of those with the tiny model, and on what they were measured."""
    parts: list[RenderableType] = []
    if result.doubles:
        parts += [Text("bench placements: stations that only take time, on a virtual clock", style="bold"), _doubles(result)]
        parts += [Text(line, style="dim") for line in (about(result.work), CONVENTION)]
    if result.real:
        parts += [Text("bench placements: the tiny model", style="bold"), _real(result)]
    load, machine = result.load, result.machine
    found = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    parts.append(Text(f"load average {load.before:.2f} to {load.after:.2f}; {found}", style="dim"))
    parts.append(Text(f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, {machine.system}", style="dim"))
    return Group(*parts)


def about(work: Mapping[str, object]) -> str:
    """The workload of the doubles in a line."""
    one = {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in work.items()}
    lengths = f"lognormal lengths, median {one['median']}, sigma {one['sigma']}, at most {one['cap']} tokens"
    moves = f"copy {one['copy_s']} s, transfer {one['transfer_s']} s, load {one['load_s']} s, handoff {one['handoff_s']} s"
    return (
        f"{one['generate']} generation devices of {one['slots']} slots, {one['train']} training device, B {one['groups']}, "
        f"K {one['size']}, S {one['staleness']} with async, {one['steps']} steps; {lengths} "
        f"(mean {one['mean']}, {float(one['cut']):.0%} are cut), {one['token_s']} s a token; {moves}"
    )


def _doubles(result: Placements) -> Table:
    shown = Table(box=None, pad_edge=False)
    columns = ("work", "placement", "steps/s", "tokens/s", "generating", "slots", "training", "lag 0, 1, ...", "of theory")
    for column in (*columns, "", "formula"):
        shown.add_column(column, justify="left" if column in ("work", "placement", "", "formula") else "right")
    for one in result.doubles:
        first, *others = one.expected
        shown.add_row(*_doubled(one), f"{first.share:.1%}", verdict(first), first.formula)
        for other in others:
            shown.add_row(*[""] * 8, f"{other.share:.1%}", verdict(other), other.formula)
    return shown


def _doubled(one: Doubled) -> list[str]:
    shares = [f"{share:.0%}" for share in (one.generating, one.slots, one.training)]
    return [one.ratio, named(one), f"{one.steps_per_s:.3f}", f"{one.tokens_per_s:.0f}", *shares, lags(one.staleness)]


def _real(result: Placements) -> Table:
    shown = Table(box=None, pad_edge=False)
    columns = (
        "placement",
        "S",
        "steps",
        "steps/s",
        "tokens/s",
        "generating",
        "training",
        "lag 0, 1, ...",
        "reward",
        "held out",
        "load",
    )
    for column in columns:
        shown.add_column(column, justify="left" if column == "placement" else "right")
    for one in result.real:
        shares = [f"{share:.0%}" for share in (one.generating, one.training)]
        rates = [f"{one.steps_per_s:.3f}", f"{one.tokens_per_s:.0f}"]
        rewards = [change(one.reward_first, one.reward_last), change(one.eval_first, one.eval_last)]
        shown.add_row(
            named(one),
            str(one.staleness_limit),
            str(one.steps),
            *rates,
            *shares,
            lags(one.staleness),
            *rewards,
            f"{one.load.after:.1f}",
        )
    return shown


def named(one: Doubled | Real) -> str:
    return f"{one.placement} {one.rollover}".rstrip()


def lags(staleness: Mapping[int, int]) -> str:
    """Shares of tokens by the versions they lag behind."""
    whole = sum(staleness.values()) or 1
    return " ".join(f"{staleness.get(lag, 0) / whole:.0%}" for lag in range(max(staleness, default=0) + 1))


def change(first: float | None, last: float | None) -> str:
    return " to ".join("-" if value is None else f"{value:.3f}" for value in (first, last))


def verdict(expected: Expected) -> str:
    """Whether what is asked for was reached; nothing where nothing is."""
    if expected.reached is None:
        return ""
    asked = f"{expected.least:.0%}" + (f" to {expected.most:.0%}" if expected.most else "")
    return f"{'reached' if expected.reached else 'missed'} ({asked})"
