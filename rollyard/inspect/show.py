"""Overview and lists as rich renderables, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from rollyard.inspect.check import Finding
from rollyard.inspect.overview import Checkpoint, Life, Overview
from rollyard.inspect.select import GroupRow, RolloutRow
from rollyard.inspect.steps import StepRow
from rollyard.texts import visible
from rollyard.watch.draw import number, sparkline

TEXTS = ("prompt", "completion")  # columns
SHOWN = 0.005  # a smaller share of the time is not worth its place
ENDS = str.maketrans({"\n": "↵", "\t": "⇥", "\r": "␍"})  # a text in one line


def line(text: str) -> Text:
    """A text in one line, whatever it has in it."""
    return Text(visible(text.translate(ENDS)))  # rich would leave out some of what drives a terminal, and say nothing


def when(seconds: float | None) -> str:
    """Such as 2026-11-30 15:49:43 UTC, of unix seconds."""
    try:
        return "-" if seconds is None else f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return str(seconds)


def _table(names: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Numbers at the right, as wide as they are; a column that holds texts is cut where there is no more room."""
    cells = list(rows)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), expand=names[-1] in TEXTS)
    for index, name in enumerate(names):
        if name in TEXTS:
            table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1)
        else:
            width = max(len(row[index]) for row in [names, *cells])
            table.add_column(name, no_wrap=True, justify="left" if name == "fate" else "right", width=width)
    for row in cells:
        table.add_row(*row)
    return table


# ------------------------------------------------------------------------------------------------------ overview


def overview(seen: Overview) -> RenderableType:
    """The run at a glance."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, text in _lines(seen):
        grid.add_row(name, Text(visible(text), "bold red" if name in ("unsound", "failed") else ""))
    return grid


def _lines(seen: Overview) -> Iterable[tuple[str, str]]:
    yield "run", f"{seen.name}   {seen.folder}{'   (going on)' if seen.goes_on else ''}"
    for life in seen.lives or ():
        yield "failed" if life.failed else "life", _life(life, seen)
    if seen.batches is not None:
        taken, trained, newest = seen.batches
        wanted = "" if seen.steps_wanted is None else f" of {seen.steps_wanted:,}"
        waiting = "" if taken == trained else f"; {taken - trained} batches taken and not trained"
        yield "steps", f"{newest or 0:,}{wanted}{waiting}"
    yield from _rewards(seen)
    yield from _time(seen.phases)
    if None not in (seen.admitted, seen.trained, seen.dropped):
        yield "prompts", _fates(seen.admitted or 0, seen.trained or 0, seen.dropped or {})
    if seen.finished is not None:
        finished, tokens, longest = seen.finished
        lost = _reasons(seen.members_dropped or {})
        yield "members", f"{finished:,} finished{f', dropped: {lost}' if lost else ''}"
        yield "tokens", f"{tokens:,} sampled, the longest completion {longest:,}"
    if seen.published:
        yield "versions", f"{seen.published:,} published"
    if seen.checkpoints:
        yield "saved", _saved(seen.checkpoints)
    if seen.engines:
        yield "engines", ", ".join(f"{count:,} {event}" for event, count in seen.engines.items())
    for at, engine, event, text in reversed(seen.problems or ()):
        yield "", f"{when(at)}  {engine} {event}{f': {text}' if text else ''}"[:300].translate(ENDS)
    for name, problem in seen.unreadable.items():
        yield "unsound", f"{name}: {problem}"
    if not seen.unreadable:
        yield "sound", "all that was read here; --check reads every page and every checkpoint"


def _time(phases: Mapping[str, float]) -> Iterable[tuple[str, str]]:
    if whole := sum(phases.values()):
        most = sorted(((spent, name) for name, spent in phases.items() if spent >= whole * SHOWN), reverse=True)
        yield "time", f"{whole:.2f} s of steps: {', '.join(f'{name} {spent / whole:.1%}' for spent, name in most)}"


def _life(life: Life, seen: Overview) -> str:
    assert seen.lives is not None
    if life.ended_at is not None:
        end = f"{when(life.ended_at)}: {life.cause}"
    elif life is seen.lives[-1] and seen.goes_on:
        end = "now"
    else:
        end = "no end: it was killed" + (", or goes on elsewhere" if life is seen.lives[-1] else "")
    return f"{life.life}, {when(life.started_at)} to {end}"


def _rewards(seen: Overview) -> Iterable[tuple[str, str]]:
    if any(reward is not None for reward in seen.rewards):
        known = [reward for reward in seen.rewards if reward is not None]
        yield "reward", f"{number(known[0])} {sparkline(seen.rewards, 30)} {number(known[-1])} by step"
    if seen.judged is not None and seen.judged[0]:
        asked, answered, mean, least, most = seen.judged
        missing = "" if asked == answered else f"; {asked - answered:,} of {asked:,} members have no verdict"
        yield "verdicts", f"mean {number(mean)}, from {number(least)} to {number(most)}{missing}"
    if seen.evaluations:
        (first, before, *_), (last, after, samples, unscored) = seen.evaluations[0], seen.evaluations[-1]
        missing = f", {unscored:,} without a verdict" if unscored else ""
        told = f"{number(before)} (version {first})"
        told += "" if len(seen.evaluations) == 1 else f" to {number(after)} (version {last})"
        yield "held out", f"{told}, {samples:,} samples{missing}"


def _fates(admitted: int, trained: int, dropped: Mapping[str, int]) -> str:
    rest, lost = admitted - trained - sum(dropped.values()), _reasons(dropped)
    parts = [f"{admitted:,} admitted", f"{trained:,} trained", *([f"dropped: {lost}"] if lost else [])]
    return ", ".join([*parts, *([f"{rest:,} under way"] if rest else [])])


def _reasons(dropped: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.items())


def _saved(points: Sequence[Checkpoint]) -> str:
    there = [point for point in points if point.state != "removed"]
    told = f"{len(points)} checkpoints, {len(there)} still there"
    for point in there:
        told += f"; step {point.step} {point.state}"
    return told


# --------------------------------------------------------------------------------------------------------- lists


def steps(rows: Iterable[StepRow], lives: bool) -> Table:
    """One row a step."""
    names = ("step", "reward", "groups", "members", "tokens", "wrote", "lag", "max", "dropped", "loss", "seconds")
    cells = (
        (
            f"{row.step}" if row.trained else f"({row.step})",
            number(row.reward_mean),
            f"{row.groups:,}",
            f"{row.members:,}",
            f"{row.tokens:,}",
            _versions(row.versions),
            number(row.lag_mean, 2),
            _plain(row.lag_max),
            _plain(row.dropped),
            "-" if row.loss is None else f"{row.loss:.3g}",
            number(row.seconds, 1),
            str(row.life),
        )
        for row in rows
    )
    return _listed(names, cells, lives)


def groups(rows: Iterable[GroupRow], lives: bool) -> Table:
    """One row a prompt."""
    names = ("group", "judged", "mean", "worst", "best", "tokens", "lag", "fate", "prompt")
    cells = (
        (
            str(row.group),
            f"{row.judged}/{row.members}",
            number(row.mean),
            number(row.worst),
            number(row.best),
            f"{row.tokens:,}",
            _plain(row.lag),
            _fate(row),
            line(row.prompt),
            str(row.life),
        )
        for row in rows
    )
    return _listed(names, cells, lives)


def rollouts(rows: Iterable[RolloutRow], lives: bool) -> Table:
    """One row a member."""
    names = ("group", "m", "reward", "tokens", "finish", "wrote", "lag", "fate", "completion")
    cells = (
        (
            str(row.group),
            str(row.member),
            number(row.reward),
            _plain(row.tokens),
            row.finish or "-",
            _versions(row.versions),
            _plain(row.lag),
            _fate(row),
            line(row.completion),
            str(row.life),
        )
        for row in rows
    )
    return _listed(names, cells, lives)


def _listed(names: Sequence[str], cells: Iterable[Sequence[str | Text]], lives: bool) -> Table:
    """With the life that is the last of the cells as the first column, where there are several."""
    if lives:
        return _table(("life", *names), ((row[-1], *row[:-1]) for row in cells))
    return _table(names, (row[:-1] for row in cells))


def findings(found: Iterable[Finding]) -> Table:
    """What is sound, and what is not."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    for each in found:
        style = "green" if each.sound else "bold red"
        table.add_row(
            Text("sound" if each.sound else "broken", style), line(each.what), Text(visible(each.text), overflow="fold")
        )
    return table


def answer(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """What a SELECT came to."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(line(name), overflow="fold")
    for row in rows:
        table.add_row(*(line(f"<{len(value)} bytes>" if isinstance(value, bytes) else _plain(value)) for value in row))
    return table


def _plain(value: object) -> str:
    return "-" if value is None else str(value)


def _versions(versions: tuple[int, int] | None) -> str:
    if versions is None:
        return "-"
    oldest, newest = versions
    return str(oldest) if oldest == newest else f"{oldest}-{newest}"


def _fate(row: GroupRow | RolloutRow) -> Text:
    if row.dropped is not None:
        return Text(row.dropped, "red")
    if row.step is None:
        return Text("under way", "yellow")
    return Text(f"step {row.step}" if row.trained else f"({row.step})")
