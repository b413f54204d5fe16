"""A timeline as SVG: a lane a device, coloured by what it does; of very many, and over very long, the share of each kind.

It stands by itself: no script, no font, no file besides. It is dark where its reader is. The same timeline gives the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import floor, log10
from typing import Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rollyard.texts import visible
from rollyard.types import Activity
from rollyard.watch.devices import ACTIVITIES, Lane
from rollyard.watch.lanes import Piece, columns, pieces, shares
from rollyard.watch.slots import Stretch
from rollyard.watch.trace import DRIVER, OF_DRIVER, Mark, Traced, bounded

COLOURS: Final[Mapping[Activity, str]] = {
    Activity.TRAIN: "#3f9e63",
    Activity.GENERATE: "#4a8fe0",
    Activity.EVAL: "#d9a92c",
    Activity.TOOLS: "#8fb7ea",
    Activity.SCORE: "#27aeb0",
    Activity.CHECKPOINT: "#b0765a",
    Activity.SYNC: "#c25bc4",
    Activity.PROMPTS: "#a9b44a",
    Activity.RESTART: "#d9534f",
    Activity.CALLER: "#b3bcc6",
    Activity.CLOSING: "#7d8590",
    Activity.SETUP: "#a4abb3",
}
STYLE: Final = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #24292f }
.paper { fill: #ffffff } .track { fill: #eceff2 } .dim { fill: #656d76 } .title { font-size: 15px; font-weight: 600 }
.name { font-weight: 600 }
.grid { stroke: #d0d7de; stroke-width: 1; fill: none }
.step { stroke: #57606a; stroke-width: 1; stroke-dasharray: 2 3; fill: none }
.life { stroke: #24292f; stroke-width: 1.5; fill: none } .queue { stroke-width: 1.2; fill: none }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.paper { fill: #0d1117 } .track { fill: #21262d } .dim { fill: #9198a1 }
.grid { stroke: #30363d } .step { stroke: #9198a1 } .life { stroke: #e6edf3 }
}
"""
WIDTH: Final = 1200
LEFT: Final = 190  # around what is drawn
RIGHT: Final = 24
HEAD: Final = 40  # of a panel: its name, and seconds
FOOT: Final = 30  # of a panel: steps
ROOM: Final = WIDTH - LEFT - RIGHT
LANE: Final = 18  # heights
POOL: Final = 96
GAP: Final = 6
FINE: Final = 4  # columns of a pixel: nothing narrower is drawn
STRIP: Final = 40  # height of slots and queue
LANES: Final = 36  # lanes at most that are drawn one by one
SOME: Final = 8  # devices of a kind that are drawn besides its shares
BINS: Final = 480  # parts of the time, for shares
LONG: Final = 16  # steps from which on the whole is drawn as shares, and CLOSE of them by themselves
CLOSE: Final = 4
LETTERS: Final = 26  # of a name at the left
TICKS: Final = 10
LABELS: Final = 30  # steps that are named

Row = Lane | tuple[Lane, ...]  # one device, or the shares of many


@dataclass(frozen=True, slots=True)
class Panel:
    """A stretch of the time, and what is drawn of it. `edges` are those of the shares, `slots` what lies in it."""

    name: str
    rows: Sequence[Row]
    marks: Sequence[Mark]
    edges: Sequence[int]
    slots: Sequence[Stretch] = ()
    lives: Sequence[tuple[int, int]] = ()  # number, and when it begins

    @property
    def start_ns(self) -> int:
        return self.edges[0]

    @property
    def length_ns(self) -> int:
        return self.edges[-1] - self.edges[0]

    @property
    def height(self) -> int:
        """Of its rows."""
        return sum(_height(row) + GAP for row in self.rows) + (STRIP + GAP if self.slots else 0)

    def x(self, at_ns: int) -> float:
        """Where a moment is; at an edge where it lies beyond."""
        return LEFT + ROOM * min(max(at_ns - self.start_ns, 0), self.length_ns) / self.length_ns


def picture(name: str, traced: Traced) -> str:
    """An SVG document.

    Args:
        name: what the title says.
    """
    cut = _setup(traced)
    panels = _panels(replace(bounded(traced), start_ns=traced.start_ns + cut)) if traced.end_ns > traced.start_ns else []
    panels = [_completed(panel, traced) for panel in panels]
    height = 56 + sum(HEAD + panel.height + FOOT for panel in panels) + 40
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", role="img")
    root.set("width", str(WIDTH))
    root.set("height", str(height))
    SubElement(root, "title").text = visible(f"{name}: what every device did")
    SubElement(root, "style").text = STYLE
    SubElement(root, "rect", {"class": "paper", "width": "100%", "height": "100%"})
    seconds = (traced.end_ns - traced.start_ns) / 1e9
    _text(root, 16, 28, name, "title")
    steps = max((mark.step for mark in traced.marks), default=0)
    told = f"{_many(traced.devices, 'device')}, {_many(steps, 'step')}, {seconds:,.4g} s"
    told += f", {len(traced.lives) + 1} lives" if traced.lives else ""
    told += f", of which the first {cut / 1e9:,.4g} s, setup, are left out" if cut else ""
    _text(root, 16, 48, f"{told}. Where a lane is blank, it waits.", "dim")
    at = 56
    for panel in panels:
        _panel(root, panel, at, traced.start_ns)
        at += HEAD + panel.height + FOOT
    _legend(root, replace(traced, start_ns=traced.start_ns + cut), at + 20)
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _setup(traced: Traced) -> int:
    """Nanoseconds at the start in which everything sets up, and that would leave little room for the rest."""
    lanes = [lane for lane in traced.lanes if lane.roles != (DRIVER,)]
    setups = ([each for each in lane.intervals if each.activity is Activity.SETUP] for lane in lanes)
    ends = [max((each.end_ns for each in setup if each.start_ns <= traced.start_ns), default=0) for setup in setups]
    spent = max(min(ends, default=0) - traced.start_ns, 0)
    rest = traced.end_ns - traced.start_ns - spent
    return max(spent - rest // 50, 0) if spent > rest // 10 and rest else 0


def _panels(traced: Traced) -> list[Panel]:
    """The whole; of a long run also a few of its steps."""
    start, end, marks = traced.start_ns, traced.end_ns, traced.marks
    if len(marks) < LONG:
        return [Panel("", _rows(traced), marks, _even(start, end))]
    every = max(1, -(-len(marks) // BINS))
    edges = sorted({start, *(mark.at_ns for mark in marks[::every]), end})
    first = len(marks) * 2 // 3
    close = marks[first : first + CLOSE]
    since, until = marks[first - 1].at_ns, close[-1].at_ns
    named = f"steps {close[0].step} to {close[-1].step}"
    found = [Panel("all steps", _pools(traced), marks, edges)]
    if until > since:
        found.append(Panel(named, _rows(traced), close, _even(since, until)))
    return found


def _completed(panel: Panel, traced: Traced) -> Panel:
    """With slots and lives."""
    start, end = panel.edges[0], panel.edges[-1]
    slots = [each for each in traced.slots if each.start_ns < end and each.end_ns > start]
    return replace(panel, slots=slots, lives=[life for life in enumerate(traced.lives, 2) if start <= life[1] < end])


def _even(start: int, end: int) -> Sequence[int]:
    return sorted({start + (end - start) * number // BINS for number in range(BINS + 1)})


def _driver(traced: Traced) -> list[Lane]:
    """What no device shows."""
    lanes = (lane for lane in traced.lanes if lane.roles == (DRIVER,))
    found = (lane._replace(intervals=[each for each in lane.intervals if each.activity in OF_DRIVER]) for lane in lanes)
    return [lane for lane in found if lane.intervals]


def _pools(traced: Traced) -> list[tuple[Lane, ...]]:
    """Devices of the same roles together."""
    pools: dict[tuple[str, ...], list[Lane]] = {}
    for lane in traced.lanes:
        if lane.roles != (DRIVER,):
            pools.setdefault(lane.roles, []).append(lane)
    return [tuple(pool) for pool in pools.values()]


def _rows(traced: Traced) -> list[Row]:
    """One for each device, or for each pool one with some of its devices."""
    pools = _pools(traced)
    lanes = [lane for lane in traced.lanes if lane.roles != (DRIVER,)]
    if len(lanes) <= LANES:
        return [*_driver(traced), *lanes]
    rows: list[Row] = [*_driver(traced)]
    for pool in pools:
        some = min(SOME, len(pool))
        if len(pool) > 1:
            rows.append(pool)
        rows += (pool[number * len(pool) // some] for number in range(some))
    return rows


def _height(row: Row) -> int:
    return LANE if isinstance(row, Lane) else POOL


# ------------------------------------------------------------------------------------------------------- drawing


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text(root: Element, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
    given = {"x": _number(x), "y": _number(y), "text-anchor": anchor}
    SubElement(root, "text", given | ({"class": kind} if kind else {})).text = visible(text)


def _panel(root: Element, panel: Panel, at: int, origin: int) -> None:
    _text(root, 16, at + HEAD - 12, panel.name, "name")
    top = at + HEAD
    _axis(root, panel, top, origin)
    for row, below in zip(panel.rows, accumulate((_height(row) + GAP for row in panel.rows), initial=top), strict=False):
        if isinstance(row, Lane):
            _lane(root, row, panel, below)
        else:
            _pool(root, row, panel, below)
    if panel.slots:
        _slots(root, panel, top + panel.height - STRIP - GAP)
    _steps(root, panel, top)


def _axis(root: Element, panel: Panel, top: int, origin: int) -> None:
    """Seconds since the run's start, as vertical lines."""
    begin, seconds = (panel.start_ns - origin) / 1e9, panel.length_ns / 1e9
    tick = _tick(seconds)
    digits = max(0, -floor(log10(tick)))
    for number in range(-int(-begin // tick), int((begin + seconds) / tick + 1e-9) + 1):
        x = LEFT + ROOM * (number * tick - begin) / seconds
        SubElement(root, "path", {"class": "grid", "d": f"M{_number(x)} {top - 6}V{top + panel.height}"})
        _text(root, x, top - 12, f"{number * tick:,.{digits}f} s", "dim", "middle")


def _tick(seconds: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** floor(log10(seconds / TICKS))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= seconds / TICKS * (1 - 1e-9))


def _lane(root: Element, lane: Lane, panel: Panel, at: int) -> None:
    """A track as long as the device was there, and on it a path for each activity."""
    group = SubElement(root, "g")
    told = lane.device if lane.devices == 1 or f"({lane.devices}" in lane.device else f"{lane.device} × {lane.devices:,}"
    SubElement(group, "title").text = visible(told)
    _text(group, LEFT - 10, at + LANE - 5, told if len(told) <= LETTERS else told[: LETTERS - 1] + "…", anchor="end")
    begin = panel.start_ns if lane.since_ns is None else lane.since_ns
    end = panel.edges[-1] if lane.until_ns is None else lane.until_ns
    track = {"x": _number(panel.x(begin)), "y": str(at), "width": _number(panel.x(end) - panel.x(begin)), "height": str(LANE)}
    SubElement(group, "rect", {"class": "track", **track})
    found = pieces(lane.intervals, panel.start_ns, panel.edges[-1])
    for activity, spent in _spent(found).items():
        bars = (
            f"M{_number(LEFT + first / FINE)} {at}h{_number((last - first) / FINE)}v{LANE}h{_number((first - last) / FINE)}z"
            for first, last in columns(found, activity, panel.start_ns, panel.length_ns / (ROOM * FINE))
        )
        path = SubElement(group, "path", {"fill": COLOURS[activity], "d": "".join(bars)})
        SubElement(path, "title").text = visible(f"{told}: {activity} {spent / 1e9:,.4g} s")


def _spent(found: Sequence[Piece]) -> Mapping[Activity, int]:
    """Nanoseconds by activity; what comes last in Activity first, so that what is drawn over it hides it."""
    spent: Counter[Activity] = Counter()
    for activity, begin, end in found:
        spent[activity] += end - begin
    return {activity: spent[activity] for activity in reversed(ACTIVITIES) if spent[activity]}


def _pool(root: Element, pool: tuple[Lane, ...], panel: Panel, at: int) -> None:
    """Shares of its devices on top of each other, from the bottom."""
    group = SubElement(root, "g")
    devices, role = sum(lane.devices for lane in pool), "+".join(pool[0].roles)
    _text(group, LEFT - 10, at + POOL / 2 - 2, f"{role} × {devices:,}", anchor="end")
    _text(group, LEFT - 10, at + POOL / 2 + 14, "share of time", "dim", "end")
    SubElement(group, "rect", {"class": "track", "x": str(LEFT), "y": str(at), "width": str(ROOM), "height": str(POOL)})
    below = [0.0] * (len(panel.edges) - 1)
    for activity, filled in shares(pool, panel.edges).items():
        above = [low + share for low, share in zip(below, filled, strict=True)]
        path = SubElement(group, "path", {"fill": COLOURS[activity], "d": _area(below, above, panel, at + POOL)})
        whole = sum(share * (end - begin) for share, (begin, end) in zip(filled, pairwise(panel.edges), strict=True))
        SubElement(path, "title").text = f"{role}: {activity} {whole / panel.length_ns:.1%} of the time"
        below = above


def _area(below: Sequence[float], above: Sequence[float], panel: Panel, bottom: int) -> str:
    """Stairs to the right along `above`, and back along `below`, for each stretch in which the two differ."""
    xs, drawn = [_number(panel.x(edge)) for edge in panel.edges], list[str]()
    for first, last in _stretches(below, above):
        there = [f"V{_number(bottom - POOL * above[i])}H{xs[i + 1]}" for i in range(first, last)]
        back = [f"V{_number(bottom - POOL * below[i])}H{xs[i]}" for i in reversed(range(first, last))]
        drawn.append(f"M{xs[first]} {_number(bottom - POOL * below[first])}{''.join(there + back)}z")
    return "".join(drawn)


def _stretches(below: Sequence[float], above: Sequence[float]) -> list[tuple[int, int]]:
    filled = [high - low > 1e-4 for low, high in zip(below, above, strict=True)]
    edges = [i for i, (one, other) in enumerate(zip([False, *filled], [*filled, False], strict=True)) if one != other]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _slots(root: Element, panel: Panel, at: int) -> None:
    """The share of slots that are busy as an area, the queue as a line up to its own maximum."""
    group = SubElement(root, "g")
    most = max(each.queue for each in panel.slots)
    _text(group, LEFT - 10, at + STRIP / 2 - 2, "slots busy", anchor="end")
    _text(group, LEFT - 10, at + STRIP / 2 + 14, f"line: queue, up to {most:,.3g}", "dim", "end")
    SubElement(group, "rect", {"class": "track", "x": str(LEFT), "y": str(at), "width": str(ROOM), "height": str(STRIP)})
    lasts = sum(each.end_ns - each.start_ns for each in panel.slots) or 1
    busy, queue = (sum(each[of] * (each.end_ns - each.start_ns) for each in panel.slots) / lasts for of in (2, 3))
    area, line, bottom, until = list[str](), list[str](), at + STRIP, -1
    for each in panel.slots:
        begin, end = (_number(panel.x(moment)) for moment in (each.start_ns, each.end_ns))
        busy_at, queue_at = _number(bottom - STRIP * each.busy), _number(bottom - (STRIP - 2) * each.queue / (most or 1))
        if each.start_ns != until:
            area.append(f"{f'V{bottom}z' if area else ''}M{begin} {bottom}")
        area.append(f"V{busy_at}H{end}")
        line.append(f"{'L' if each.start_ns == until else 'M'}{begin} {queue_at}H{end}")
        until = each.end_ns
    drawn = SubElement(group, "path", {"fill": COLOURS[Activity.GENERATE], "d": f"{''.join(area)}V{bottom}z"})
    SubElement(drawn, "title").text = f"slots busy: {busy:.1%} on average"
    drawn = SubElement(group, "path", {"class": "queue", "stroke": COLOURS[Activity.RESTART], "d": "".join(line)})
    SubElement(drawn, "title").text = f"requests that wait: {queue:,.3g} on average"


def _steps(root: Element, panel: Panel, top: int) -> None:
    """The end of each step; of many, of every n-th."""
    every = max(1, -(-len(panel.marks) // LABELS))
    for step, at in panel.marks[every - 1 :: every]:
        x, bottom = panel.x(at), top + panel.height
        SubElement(root, "path", {"class": "step", "d": f"M{_number(x)} {top - 2}V{bottom + 2}"})
        _text(root, x, bottom + 15, f"{step:,}", "dim", "middle")
    if panel.marks:
        _text(root, LEFT - 10, top + panel.height + 15, "end of step", "dim", "end")
    for life, at in panel.lives:
        x, bottom = panel.x(at), top + panel.height
        SubElement(root, "path", {"class": "life", "d": f"M{_number(x)} {top - 2}V{bottom + 16}"})
        _text(root, x, bottom + 28, f"life {life}", "dim", "middle")


def _legend(root: Element, traced: Traced, at: int) -> None:
    """Activities, with their share of the time of all devices."""
    spent: Counter[Activity] = Counter()
    for lane in traced.lanes:
        if lane.roles != (DRIVER,):
            for activity, nanoseconds in _spent(pieces(lane.intervals, traced.start_ns, traced.end_ns)).items():
                spent[activity] += nanoseconds * lane.devices
    whole = (traced.end_ns - traced.start_ns) * traced.devices or 1
    of_driver = {each.activity for lane in _driver(traced) for each in lane.intervals}
    shown = [activity for activity in ACTIVITIES if spent[activity] or activity in of_driver]
    names = [_named(activity, spent[activity] / whole) for activity in shown]
    places = accumulate((len(each) * 6.6 + 34 for each in names), initial=float(LEFT))
    for activity, told, x in zip(shown, names, places, strict=False):
        SubElement(root, "rect", {"x": _number(x), "y": str(at - 10), "width": "12", "height": "12", "fill": COLOURS[activity]})
        _text(root, x + 18, at, told)


def _named(activity: Activity, share: float) -> str:
    if not share:
        return str(activity)
    return f"{activity} {share:.0%}" if share >= 0.005 else f"{activity} <1%"
