"""Pictures of a run as rich renderables: the live panel and the report's table. No state, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rich.bar import Bar
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rollyard.types import Verdict
from rollyard.watch.devices import Cause, DeviceTime
from rollyard.watch.foretold import foretold
from rollyard.watch.report import Counts, EvalRewards, Filtering, Lengths, Report, RewardCurve, WeightTraffic
from rollyard.watch.snapshot import Header, Snapshot
from rollyard.watch.survived import survival
from rollyard.watch.timeline import PhaseSeconds
from rollyard.watch.usage import SHOWN, lags, ledger, tables

COLOURS: Final = {
    "generate": "blue",
    "tools": "bright_blue",
    "score": "cyan",
    "train": "green",
    "sync": "magenta",
    "eval": "yellow",
    "checkpoint": "bright_magenta",
    "setup": "bright_black",
    "unaccounted": "red",
}
TRACK: Final = "grey23"  # the part of a bar that is not filled
LEVELS: Final = "▁▂▃▄▅▆▇█"
EIGHTHS: Final = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
LABEL: Final = 9  # columns of the names at the left
WIDEST: Final = 120  # columns: beyond, the eye loses the line
NARROW: Final = 60  # columns, below which tables leave out what others imply
LONG: Final = 0.05  # share of the run from which on the canary is worth a line
MOMENT_S: Final = 0.1  # and a wait for the caller
SHADES: Final = "█▓▒░"  # one after the other, where there are no colours


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The curve in at most `width` characters, lowest to highest value; each is the mean of its part of the curve.

    A part without a value is a space.
    """
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    if len(values) <= width:
        parts = [[value] for value in values]
    known = [[value for value in part if value is not None] for part in parts]
    means = [sum(part) / len(part) if part else None for part in known]
    present = [mean for mean in means if mean is not None]
    if not present:
        return " " * len(means)
    low, high = min(present), max(present)
    scale = (len(LEVELS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else LEVELS[round((mean - low) * scale)] for mean in means)


def cells(parts: Mapping[str, float], width: int) -> dict[str, int]:
    """Share `width` cells among the parts in proportion, by largest remainder: they add up to `width` exactly."""
    total = sum(parts.values())
    if total <= 0:
        return dict.fromkeys(parts, 0)
    exact = {name: part / total * width for name, part in parts.items()}
    whole = {name: int(size) for name, size in exact.items()}
    for name in sorted(parts, key=lambda name: whole[name] - exact[name])[: width - sum(whole.values())]:
        whole[name] += 1
    return whole


def stacked(parts: Mapping[str, float], width: int, *, shades: bool = False) -> Text:
    """Shares of a whole side by side, in the colours of the phases; also in shades, for whom there are no colours."""
    kinds = _shades(parts) if shades else {}
    return Text.assemble(*((kinds.get(name, "█") * size, COLOURS[name]) for name, size in cells(parts, width).items()))


def _shades(parts: Mapping[str, float]) -> dict[str, str]:
    """Of each that takes some of the whole: neighbours differ."""
    return {name: SHADES[at % len(SHADES)] for at, name in enumerate(name for name, part in parts.items() if part > 0)}


def bar(share: float, width: int, colour: str) -> Text:
    """A bar filled to `share` (0 to 1) of its width, in eighths of a character."""
    whole, eighths = divmod(round(share * width * 8), 8)
    filled = "█" * whole + EIGHTHS[eighths]
    return Text(filled.ljust(width), f"{colour} on {TRACK}")


def duration(seconds: float) -> str:
    """`m:ss`, or `h:mm:ss` from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def shares(phases: PhaseSeconds) -> dict[str, float]:
    """Share of the wall time by phase, those that took less than half a percent left out."""
    return {name: seconds / phases.wall_s for name, seconds in phases.parts().items() if seconds > phases.wall_s * SHOWN}


def _flowing(parts: Sequence[Text], width: int, between: str) -> list[Text]:
    """Parts of a line one after the other, in as many lines as it takes."""
    lines = [Text()]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(between) + len(part) > width:
            lines.append(Text())
        lines[-1].append(between if lines[-1] else "").append_text(part)
    return lines


def _grid(rows: Sequence[tuple[str, RenderableType]]) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(style="bold", width=LABEL, no_wrap=True)
    grid.add_column(ratio=1)
    for name, value in rows:
        grid.add_row(name, value)
    return grid


def _reward(rewards: Sequence[float | None], eval_first: float | None, eval_last: float | None, width: int = 80) -> Text:
    """In two lines where one is too narrow."""
    known = [reward for reward in rewards if reward is not None]
    shown, told = Text(f"{number(known[-1] if known else None)}  "), Text()
    if eval_first is not None:
        told.append(f"held-out {number(eval_first)}")
        if eval_last != eval_first:
            told.append(f" → {number(eval_last)}")
    shown.append(sparkline(rewards, min(30, max(width - len(shown), 1))), "green")
    return Text("\n").join(_flowing([shown, *([told] if told else [])], width, "  "))


class LivePanel:
    """The live view, in as many lines as its width takes. Made of plain lines of text: a frame takes about two milliseconds.

    Args:
        since_s: seconds since the snapshot was taken, so that the clock goes on between two.
    """

    def __init__(self, header: Header, snapshot: Snapshot, since_s: float = 0.0) -> None:
        self._header, self._snapshot, self._since_s = header, snapshot, since_s
        self.drawn = 0, 0  # columns and lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = min(options.max_width, WIDEST)
        lines = self._lines(max(columns - LABEL - 4, 20), shades=_colourless(console))
        self.drawn = columns, len(lines) + 2
        text = Text("\n", no_wrap=True, overflow="ellipsis").join(
            Text.assemble((label.ljust(LABEL), "bold"), line) for label, line in lines
        )
        title, time = Text(f"rollyard · {self._header.run}", "bold"), Text(self._time())
        yield Panel(text, title=title, title_align="left", subtitle=time, subtitle_align="right", width=columns)

    def _time(self) -> str:
        time = duration(self._snapshot.phases.wall_s + self._since_s)
        return f"{time} · {told}" if (told := eta(self._snapshot, self._header.steps, self._since_s)) else time

    def _lines(self, width: int, *, shades: bool) -> list[tuple[str, Text]]:
        header, snapshot = self._header, self._snapshot
        steps = f" {snapshot.step}/{header.steps}"
        progress = Text.assemble(bar(snapshot.step / header.steps, width - len(steps), "green"), steps)
        now = [Text(snapshot.activity)]
        if snapshot.wanted:
            now.append(Text(f"{snapshot.judged}/{snapshot.wanted} completions judged", "dim"))
        if snapshot.phases.scoring_s:
            now.append(Text(f"scoring {snapshot.phases.scoring_hidden_s / snapshot.phases.scoring_s:.0%} hidden", "dim"))
        speed = [Text(f"{snapshot.tokens_per_s:,.0f} tokens/s"), Text(f"dropped {snapshot.dropped}")]
        if snapshot.slots_busy is not None:
            speed.append(
                Text(f"slots busy {snapshot.slots_busy:.0%} ").append_text(bar(snapshot.slots_busy, min(16, width - 16), "blue"))
            )
        reward = _reward(snapshot.rewards, snapshot.eval_first, snapshot.eval_last, width)
        kinds = _shades(snapshot.phases.parts()) if shades else {}
        legend = [
            Text.assemble((f"{kinds.get(name, '■')} ", COLOURS[name]), f"{name} {share:.0%}")
            for name, share in shares(snapshot.phases).items()
        ]
        return [
            *_labelled("model", _flowing([Text(header.model), Text(f"{header.placement} · {header.engine}")], width, "   ")),
            ("step", progress),
            *_labelled("now", _flowing(now, width, "  ")),
            *_labelled("reward", list(reward.split())),
            *_labelled("speed", _flowing(speed, width, "   ")),
            ("time", stacked(snapshot.phases.parts(), width, shades=shades)),
            *_labelled("", _flowing(legend, width, "  ")),
        ]


def _colourless(console: Console) -> bool:
    return console.no_color or console.color_system is None


def _labelled(label: str, lines: Sequence[Text]) -> list[tuple[str, Text]]:
    """The first of them has the label."""
    return [(label if at == 0 else "", line) for at, line in enumerate(lines)]


def eta(snapshot: Snapshot, steps: int, since_s: float = 0.0) -> str:
    """Such as `eta 1:30`, or `eta ~1:30` where no step is done; empty where nothing tells yet.

    Args:
        since_s: seconds since the snapshot was taken.
    """
    left = snapshot.eta_s(steps)
    rough = "~" if snapshot.left.rough else ""
    return "" if left is None else f"eta {rough}{duration(max(left - since_s, 0.0))}"


def table(report: Report) -> RenderableType:
    """The report for people: what came out, where prompts went, and the phase shares side by side."""
    return _Table(report)


class _Table:
    """As wide as there is room, and as it can be read."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = min(options.max_width, WIDEST)
        yield _report_panel(self._report, columns)


def _report_panel(report: Report, columns: int) -> Panel:
    speed = f"{report.generation_tokens:,} tokens, {report.generation_tokens_per_s:,.0f} a second of generation"
    rows: list[tuple[str, RenderableType]] = [
        ("model", Text(f"{report.model}   {report.placement} · {report.engine}")),
        ("steps", f"{report.steps} in {duration(report.wall_s)} ({report.wall_s:.1f} s)"),
        ("reward", _reward(report.reward.curve, report.eval.first, report.eval.last, columns - LABEL - 6)),
        *([("", Text(_unscored(report.eval), "bold red"))] if report.eval.unscored else []),
        *(_by_name(report.rewards, report.eval.rewards) if len(report.rewards) > 1 else []),
        ("speed", f"{speed}, slots busy {report.slots_busy:.0%}"),
        *([("scoring", _scoring(report.phases))] if report.phases.scoring_s else []),
        *([("decoder", Text(report.decoder))] if report.decoder else []),
        *([("objective", Text(report.objective))] if report.objective else []),
        ("lengths", _lengths(report.lengths)),
        ("prompts", _counts(report.prompts)),
        ("members", _counts(report.members)),
        ("tokens", ledger(report.tokens)),
        *([("filter", _filtering(report.filtering))] if report.filtering != Filtering() else []),
        *([("stale", lags(report.staleness))] if report.staleness else []),
        ("weights", _copied(len(report.versions), report.weights)),
        *_arrival(report.weights, report.wall_s),
        *_caller(report.usage.devices),
        *([("nodes", Text(places(report.nodes)))] if report.nodes else []),
        *([("slow", Text(", ".join(f"{name} {times}x" for name, times in report.slow.items())))] if report.slow else []),
        *([("lost", Text("; ".join(report.lost), "bold red"))] if report.lost else []),
        ("ended", Text(report.finished.cause, "bold red" if report.finished.failed else "")),
    ]
    title = Text(f"rollyard · {report.name}{' (simulated)' if report.simulated else ''}", "bold")
    more = (*foretold(report.forecast), *survival(report.survival), *tables(report.usage, narrow=columns < NARROW))
    parts = (_grid(rows), Text(), _phases(report.phases), *more)
    return Panel(Group(*parts), title=title, title_align="left", width=columns)


def _scoring(phases: PhaseSeconds) -> str:
    hidden = phases.scoring_hidden_s / phases.scoring_s
    return f"{phases.scoring_s:.2f} s, {hidden:.0%} of it while completions were written; {phases.score_s:.2f} s waited for"


def _unscored(found: EvalRewards) -> str:
    return f"{found.unscored:,} of {found.samples:,} held-out completions have no verdict, and are in no mean"


def _by_name(rewards: Mapping[str, RewardCurve], held_out: Mapping[str, tuple[float, float]]) -> list[tuple[str, RenderableType]]:
    """The curve of each reward, before weights."""
    none = (None, None)
    return [("", _reward(each.curve, *held_out.get(name, none)).append(f"  {name}")) for name, each in rewards.items()]


def _lengths(lengths: Lengths) -> str:
    if lengths.mean is None:
        return "-"
    spread = f"mean {lengths.mean:.1f}, p50 {lengths.p50}, p95 {lengths.p95}, max {lengths.max} tokens"
    return f"{spread}, {lengths.truncated_share:.1%} truncated"


def _copied(versions: int, weights: WeightTraffic) -> str:
    """Where nothing travels there are copies all the same."""
    whose = " (by engines, to pack their weights)" if weights.transport == "in_place" and weights.bytes_copied else ""
    return f"{versions} versions, {weights.transport}, {weights.bytes_copied:,} bytes copied{whose}"


def _arrival(weights: WeightTraffic, wall_s: float) -> list[tuple[str, RenderableType]]:
    """What is known of weights having arrived, and that nothing is where it was not looked at."""
    rows: list[tuple[str, RenderableType]] = []
    if weights.unchanged is not None:
        rows.append(("sent", f"{weights.bytes_sent:,} bytes; {weights.unchanged:.2%} of a version as in the one before"))
    if weights.handed:
        count = len(weights.handed)
        size, seconds = sum(each.bytes for each in weights.handed) / count, sum(each.seconds for each in weights.handed) / count
        beside = f"{size / weights.size:.1f} times what async moves"
        rows.append(("handed", f"{count} states of {size / 1e6:.3g} MB in {seconds:.3f} s, {beside}"))
    if (canary := weights.canary) is not None:
        rows.append(("canary", f"{canary.tensors} tensors moved, engines {canary.gap:.1g} nats off (limit {canary.limit:.2g})"))
        if canary.seconds > wall_s * LONG:
            rows.append(("", f"canary {canary.seconds:.1f} s of sync, once (weights.canary false skips it)"))
        if canary.unseen:
            rows.append(("unseen", Text(", ".join(canary.unseen))))
    else:
        rows.append(("canary", "not made: nothing proves that every tensor reaches the engines"))
    if weights.probes:
        rows.append(("probes", ", ".join(f"{count} {verdict}" for verdict, count in weights.probes.items())))
        if Verdict.UNDECIDABLE in weights.probes:
            rows.append(("", "undecidable: no version before it, or one too much like it to be told apart"))
    return rows


def _caller(devices: Iterable[DeviceTime]) -> list[tuple[str, RenderableType]]:
    """How long batches waited for a trainer of the caller's."""
    waited = max((device.wait_ns.get(Cause.CALLER.value, 0) for device in devices if "trainer" in device.roles), default=0) / 1e9
    told = f"devices waited {waited:.2f} s for batches to be taken: no phase of the run, so it is unaccounted"
    return [("caller", told)] if waited >= MOMENT_S else []


def places(nodes: Mapping[str, Sequence[str]]) -> str:
    """Such as `10.0.0.1 trainer-0; 10.0.0.2 engine-0, engine-1`: each node with the hosts that are there at last."""
    there: dict[str, list[str]] = {}
    for host, seen in nodes.items():
        there.setdefault(seen[-1], []).append(host)
    return "; ".join(f"{node} {', '.join(hosts)}" for node, hosts in sorted(there.items()))


def _counts(counts: Counts) -> str:
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.dropped.items())
    dropped = sum(counts.dropped.values())
    return f"{counts.admitted} admitted, {counts.trained} trained, {dropped} dropped" + (f" ({reasons})" if reasons else "")


def _filtering(found: Filtering) -> str:
    told = f"{found.dropped} prompts with equal rewards dropped, {found.refills} asked in their place"
    return told + (f", {found.trained} more trained on: rollout.refills was reached" if found.trained else "")


def _phases(phases: PhaseSeconds) -> Table:
    """Every phase with its seconds and its share as a bar; all bars on one scale."""
    grid = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style="bold", show_edge=False)
    grid.add_column("phase", width=11, no_wrap=True)
    grid.add_column("seconds", justify="right", no_wrap=True)
    grid.add_column("of wall", justify="right", no_wrap=True)
    grid.add_column(ratio=1)
    total = phases.wall_s or 1.0
    longest = max(phases.parts().values())
    for name, seconds in phases.parts().items():
        grid.add_row(name, f"{seconds:.2f}", f"{seconds / total:.1%}", Bar(longest or 1.0, 0.0, seconds, color=COLOURS[name]))
    grid.add_row("wall", f"{phases.wall_s:.2f}", "100.0%", "", style="bold")
    return grid
