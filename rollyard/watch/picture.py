"""A timeline as SVG: one lane a device, coloured by what it does; of very many, the share of a pool that does what.

It stands by itself: no script, no font, no file besides. It is dark where its reader is. The same timeline gives the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import floor, log10
from typing import Final
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rollyard.texts import visible
from rollyard.types import Activity
from rollyard.watch.devices import ACTIVITIES, Lane
from rollyard.watch.lanes import Piece, columns, pieces, shares
from rollyard.watch.trace import DRIVER, Traced

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
    Activity.CLOSING: "#7d8590",
    Activity.SETUP: "#a4abb3",
}
STYLE: Final = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #24292f }
.paper { fill: #ffffff } .track { fill: #eceff2 } .dim { fill: #656d76 } .title { font-size: 15px; font-weight: 600 }
.grid { stroke: #d0d7de; stroke-width: 1; fill: none }
.step { stroke: #57606a; stroke-width: 1; stroke-dasharray: 2 3; fill: none }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 }
.paper { fill: #0d1117 } .track { fill: #21262d } .dim { fill: #9198a1 }
.grid { stroke: #30363d } .step { stroke: #9198a1 }
}
"""
WIDTH: Final = 1200
LEFT: Final = 190  # around what is drawn
RIGHT: Final = 24
TOP: Final = 84
ROOM: Final = WIDTH - LEFT - RIGHT
FINE: Final = 4  # columns of a pixel: nothing narrower is drawn
LANES: Final = 36  # lanes at most that are drawn one by one
SOME: Final = 6  # devices of a pool that are drawn besides its shares
BINS: Final = 480  # parts of the time, for shares
LANE: Final = 18  # heights
POOL: Final = 96
GAP: Final = 6
LETTERS: Final = 26  # of a name at the left
TICKS: Final = 10
LABELS: Final = 30  # steps that are named; lines of four times as many are drawn


def picture(name: str, traced: Traced) -> str:
    """An SVG document.

    Args:
        name: what the title says.
    """
    rows = _rows(traced)
    height = TOP + sum(_height(row) + GAP for row in rows) + 76
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", role="img")
    root.set("width", str(WIDTH))
    root.set("height", str(height))
    SubElement(root, "title").text = visible(f"{name}: what every device did")
    SubElement(root, "style").text = STYLE
    SubElement(root, "rect", {"class": "paper", "width": "100%", "height": "100%"})
    devices = traced.devices
    _text(root, 16, 28, name, "title")
    told = f"{devices:,} device{'s' * (devices != 1)}, {_seconds(traced):,.4g} s, {len(traced.marks):,} steps; blank: it waits"
    _text(root, 16, 48, told, "dim")
    bottom = _axis(root, traced, height - 76)
    at = TOP
    for row in rows:
        _row(root, row, traced, at)
        at += _height(row) + GAP
    _steps(root, traced, bottom)
    _legend(root, traced, height - 24)
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


Row = Lane | tuple[Lane, ...]  # one device, or the shares of many


def _rows(traced: Traced) -> list[Row]:
    """One for each device, or for each pool one with some of its devices."""
    driver = [lane for lane in traced.lanes if lane.roles == (DRIVER,) and lane.intervals]
    others = [lane for lane in traced.lanes if lane.roles != (DRIVER,)]
    if len(others) <= LANES and all(lane.devices == 1 for lane in others):
        return [*driver, *others]
    pools: dict[tuple[str, ...], list[Lane]] = {}
    for lane in others:
        pools.setdefault(lane.roles, []).append(lane)
    rows: list[Row] = [*driver]
    for pool in pools.values():
        some = min(SOME, len(pool))
        rows += [tuple(pool), *(pool[i * len(pool) // some] for i in range(some))]
    return rows


def _height(row: Row) -> int:
    return LANE if isinstance(row, Lane) else POOL


def _seconds(traced: Traced) -> float:
    return (traced.end_ns - traced.start_ns) / 1e9


def _x(at_ns: int, traced: Traced) -> float:
    return LEFT + ROOM * (at_ns - traced.start_ns) / (traced.end_ns - traced.start_ns or 1)


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text(root: Element, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> Element:
    made = SubElement(
        root, "text", {"x": _number(x), "y": _number(y), "text-anchor": anchor, **({"class": kind} if kind else {})}
    )
    made.text = visible(text)
    return made


def _axis(root: Element, traced: Traced, bottom: int) -> int:
    """Seconds, as vertical lines; returns where they end."""
    seconds = _seconds(traced)
    tick = _tick(seconds)
    digits = max(0, -floor(log10(tick)))
    for number in range(int(seconds / tick + 1e-9) + 1):
        x = LEFT + ROOM * number * tick / (seconds or 1.0)
        SubElement(root, "path", {"class": "grid", "d": f"M{_number(x)} {TOP - 6}V{bottom}"})
        _text(root, x, TOP - 12, f"{number * tick:,.{digits}f} s", "dim", "middle")
    return bottom


def _tick(seconds: float) -> float:
    """1, 2 or 5 times a power of ten."""
    least = max(seconds, 1e-6) / TICKS
    power = 10.0 ** floor(log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))


def _row(root: Element, row: Row, traced: Traced, at: int) -> None:
    if isinstance(row, Lane):
        _lane(root, row, traced, at)
    else:
        _pool(root, row, traced, at)


def _lane(root: Element, lane: Lane, traced: Traced, at: int) -> None:
    """A track as long as the device was there, and on it a path for each activity."""
    group = SubElement(root, "g")
    name = lane.device if len(lane.device) <= LETTERS else lane.device[: LETTERS - 1] + "…"
    SubElement(group, "title").text = visible(lane.device)
    _text(group, LEFT - 10, at + LANE - 5, name, anchor="end")
    begin = _x(traced.start_ns if lane.since_ns is None else lane.since_ns, traced)
    end = _x(traced.end_ns if lane.until_ns is None else lane.until_ns, traced)
    track = {"x": _number(begin), "y": str(at), "width": _number(max(end - begin, 0.0)), "height": str(LANE)}
    SubElement(group, "rect", {"class": "track", **track})
    found = pieces(lane.intervals, traced.start_ns, traced.end_ns)
    width_ns = (traced.end_ns - traced.start_ns) / (ROOM * FINE) or 1.0
    for activity, spent in _spent(found).items():
        bars = (
            f"M{_number(LEFT + first / FINE)} {at}h{_number((last - first) / FINE)}v{LANE}h{_number((first - last) / FINE)}z"
            for first, last in columns(found, activity, traced.start_ns, width_ns)
        )
        path = SubElement(group, "path", {"fill": COLOURS[activity], "d": "".join(bars)})
        SubElement(path, "title").text = visible(f"{lane.device}: {activity} {spent / 1e9:,.4g} s")


def _spent(found: Sequence[Piece]) -> Mapping[Activity, int]:
    """Nanoseconds by activity; what comes last in Activity first, so that what is drawn over it hides it."""
    spent: Counter[Activity] = Counter()
    for activity, begin, end in found:
        spent[activity] += end - begin
    return {activity: spent[activity] for activity in reversed(ACTIVITIES) if spent[activity]}


def _pool(root: Element, pool: tuple[Lane, ...], traced: Traced, at: int) -> None:
    """Shares of its devices on top of each other, from the bottom."""
    group = SubElement(root, "g")
    devices, role = sum(lane.devices for lane in pool), "+".join(pool[0].roles)
    _text(group, LEFT - 10, at + POOL / 2 - 2, f"{devices:,} × {role}", anchor="end")
    _text(group, LEFT - 10, at + POOL / 2 + 14, "share at work", "dim", "end")
    SubElement(group, "rect", {"class": "track", "x": str(LEFT), "y": str(at), "width": str(ROOM), "height": str(POOL)})
    below = [0.0] * BINS
    for activity, filled in shares(pool, traced.start_ns, traced.end_ns, BINS).items():
        above = [low + share for low, share in zip(below, filled, strict=True)]
        path = SubElement(group, "path", {"fill": COLOURS[activity], "d": _area(below, above, at + POOL)})
        SubElement(path, "title").text = f"{role}: {activity} {sum(filled) / BINS:.1%} of the time of all"
        below = above


def _area(below: Sequence[float], above: Sequence[float], bottom: int) -> str:
    """Stairs to the right along `above`, and back along `below`, for each stretch in which the two differ."""
    width, drawn = ROOM / BINS, list[str]()
    for first, last in _stretches(below, above):
        there = [f"V{_number(bottom - POOL * above[i])}H{_number(LEFT + width * (i + 1))}" for i in range(first, last)]
        back = [f"V{_number(bottom - POOL * below[i])}H{_number(LEFT + width * i)}" for i in reversed(range(first, last))]
        drawn.append(f"M{_number(LEFT + width * first)} {_number(bottom - POOL * below[first])}{''.join(there + back)}z")
    return "".join(drawn)


def _stretches(below: Sequence[float], above: Sequence[float]) -> list[tuple[int, int]]:
    filled = [high - low > 1e-4 for low, high in zip(below, above, strict=True)]
    edges = [i for i, (one, other) in enumerate(zip([False, *filled], [*filled, False], strict=True)) if one != other]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _steps(root: Element, traced: Traced, bottom: int) -> None:
    """The end of each step; of many, of every n-th."""
    lines, labels = (max(1, -(-len(traced.marks) // most)) for most in (4 * LABELS, LABELS))
    for number, (step, at) in enumerate(traced.marks, start=1):
        x = _x(at, traced)
        if number % lines == 0:
            SubElement(root, "path", {"class": "step", "d": f"M{_number(x)} {TOP - 2}V{bottom + 4}"})
        if number % labels == 0:
            _text(root, x, bottom + 18, str(step), "dim", "middle")
    if traced.marks:
        _text(root, LEFT - 10, bottom + 18, "end of step", "dim", "end")


def _legend(root: Element, traced: Traced, at: int) -> None:
    """Activities with their share of the time of all devices."""
    lanes = [lane for lane in traced.lanes if lane.roles != (DRIVER,)] or list(traced.lanes)
    spent: Counter[Activity] = Counter()
    for lane in lanes:
        for activity, nanoseconds in _spent(pieces(lane.intervals, traced.start_ns, traced.end_ns)).items():
            spent[activity] += nanoseconds * lane.devices
    whole = (traced.end_ns - traced.start_ns) * sum(lane.devices for lane in lanes) or 1
    done = {interval.activity for lane in traced.lanes for interval in lane.intervals}
    shown = [activity for activity in ACTIVITIES if activity in done]
    names = [f"{activity} {spent[activity] / whole:.0%}" if spent[activity] else str(activity) for activity in shown]
    places = accumulate((len(each) * 6.6 + 34 for each in names), initial=float(LEFT))
    for activity, told, x in zip(shown, names, places, strict=False):
        SubElement(root, "rect", {"x": _number(x), "y": str(at - 10), "width": "12", "height": "12", "fill": COLOURS[activity]})
        _text(root, x + 18, at, told)
