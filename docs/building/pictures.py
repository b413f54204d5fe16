"""Draws docs/timeline.svg and the pictures of docs/concepts/: `python docs/building/pictures.py`, the same bytes each time.

Timelines come from the simulator (the classic preset, and examples/placements.toml). Of the others each bar is computed here
from a few numbers, in units that stand for nothing: they show what happens in which order, not how long it takes.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rollyard import cli
from rollyard.watch.picture import STYLE

ROOT = Path(__file__).parent.parent.parent
PLACEMENTS = {
    "colocated": ["--place.train", "2"],
    "separate": [],
    "async": ["--rollout.max_staleness", "1"],
    "swap": ["--rollout.max_staleness", "1"],
}
VERSIONS = ("#4a8fe0", "#d9822c", "#3f9e63", "#c25bc4", "#27aeb0", "#b0765a", "#7d8590", "#d9a92c")
TRAIN, WAIT, READ, SYNC, PROBE = "#3f9e63", "#a4abb3", "#8fb7ea", "#c25bc4", "#d9a92c"
WIDTH, LEFT, LANE, GAP = 900, 120, 22, 6


@dataclass(frozen=True, slots=True)
class Bar:
    """What a lane does for a while."""

    lane: str
    start: float
    end: float
    colour: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """Lanes under one heading. `marks` are moments with a name."""

    title: str
    bars: Sequence[Bar]
    marks: Sequence[tuple[float, str]] = ()


# ----------------------------------------------------------------------------------------------------- rollover

LENGTHS = {"slot 1": (4, 5, 4), "slot 2": (9, 4), "slot 3": (6, 3, 5), "slot 4": (14,)}
ARRIVES, READS = 5.0, 0.8  # when the new weights are at hand, and what it takes to read again what was written before


def rollover(policy: str) -> Part:
    """One engine with four slots, whose requests are of given lengths, takes new weights at 5."""
    end = max(_drained(lengths) for lengths in LENGTHS.values()) if policy == "drain" else ARRIVES
    bars = [bar for slot, lengths in LENGTHS.items() for bar in _slot(slot, lengths, policy, end)]
    marks = [(ARRIVES, "weights are here")] + ([(end, "loaded")] if end > ARRIVES else [])
    return Part(ROLLOVERS[policy], bars, marks)


def _drained(lengths: Sequence[float]) -> float:
    """When what had begun before the weights came is finished."""
    at = 0.0
    for length in lengths:
        if at >= ARRIVES:
            break
        at += length
    return at


def _slot(slot: str, lengths: Sequence[float], policy: str, loaded: float) -> Iterator[Bar]:
    at = 0.0
    for length in lengths:
        if policy == "drain" and ARRIVES <= at < loaded:
            yield Bar(slot, at, loaded, WAIT, "waits")
            at = loaded
        if at < ARRIVES < at + length and policy != "drain":
            yield Bar(slot, at, ARRIVES, VERSIONS[0])
            left = at + length - ARRIVES
            again = ARRIVES + (READS if policy == "abort" else 0)
            if policy == "abort":
                yield Bar(slot, ARRIVES, again, READ)
            yield Bar(slot, again, again + left, VERSIONS[1])
            at = again + left
        else:
            yield Bar(slot, at, at + length, VERSIONS[int(at >= loaded)])
            at += length


ROLLOVERS = {
    "drain": "drain: what runs is finished first, and nothing new begins",
    "abort": "abort: what runs is cut, read again with the new weights, and goes on",
    "keep": "keep: the weights change under what runs",
}


# ---------------------------------------------------------------------------------------------------- staleness

WRITES, TRAINS, BATCHES = (2.0, 2.0, 6.0, 2.0, 2.0, 6.0, 2.0, 2.0), 3.0, 8


def staleness(limit: int) -> Part:
    """Batch d begins once weights v are there with d <= v + limit, and is trained once it is written and d - 1 is trained."""
    written, trained, bars = 0.0, [0.0], []
    for batch, seconds in enumerate(WRITES):
        start = max(written, trained[max(batch - limit, 0)])
        version = sum(end <= start for end in trained) - 1
        written = start + seconds
        bars.append(Bar("engines", start, written, VERSIONS[version], f"{batch}"))
        begins = max(written, trained[-1])
        trained.append(begins + TRAINS)
        bars.append(Bar("trainer", begins, trained[-1], VERSIONS[batch], f"{batch}"))
    said = f"{limit} version{'s' * (limit != 1)}"
    return Part(f"staleness of at most {said}: batch {BATCHES - 1} is trained at {trained[-1]:g}", bars)


# --------------------------------------------------------------------------------------------------------- sync


def sync() -> Part:
    """The steps of docs/weights.md, one engine."""
    bars = [
        Bar("trainer", 0, 3, TRAIN, "trains into version 1"),
        Bar("trainer", 3, 3.6, SYNC, "copy"),
        Bar("trainer", 3.6, 12, TRAIN, "trains into version 2"),
        *(Bar("link", 3.2 + n * 0.55, 3.2 + n * 0.55 + 0.48, SYNC, f"{n + 1}") for n in range(8)),
        Bar("engine", 0, 7.9, VERSIONS[0], "writes with version 0"),
        Bar("engine", 7.9, 8.5, SYNC, "load"),
        Bar("engine", 8.5, 9.2, PROBE, "probe"),
        Bar("engine", 9.2, 12, VERSIONS[1], "writes with version 1"),
    ]
    marks = [(3.0, "publish"), (3.6, "prepare"), (7.9, "load"), (9.2, "resume")]
    return Part("version 1 on its way to an engine (asynchronous; not to scale)", bars, marks)


# ------------------------------------------------------------------------------------------------------- drawing


def draw(title: str, parts: Sequence[Part], legend: Sequence[tuple[str, str]]) -> str:
    """An SVG document: every part on the same scale of time."""
    longest = max(bar.end for part in parts for bar in part.bars)
    heights = [44 + (LANE + GAP) * len(_lanes(part)) + 14 for part in parts]
    height = sum(heights) + 44
    root = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {height}", role="img")
    root.set("width", str(WIDTH))
    root.set("height", str(height))
    SubElement(root, "title").text = title
    SubElement(root, "style").text = STYLE + ".on { fill: #ffffff; font-weight: 600 }\n"
    SubElement(root, "rect", {"class": "paper", "width": "100%", "height": "100%"})
    scale = (WIDTH - LEFT - 24) / longest
    top = 0
    for part, tall in zip(parts, heights, strict=True):
        _part(root, part, top, scale)
        top += tall
    x = 16.0
    for colour, name in legend:
        SubElement(root, "rect", {"x": f"{x:g}", "y": str(top + 12), "width": "12", "height": "12", "fill": colour})
        _text(root, x + 18, top + 22, name)
        x += 34 + 6.6 * len(name)
    indent(root)
    return tostring(root, encoding="unicode") + "\n"


def _lanes(part: Part) -> list[str]:
    return list(dict.fromkeys(bar.lane for bar in part.bars))


def _part(root: Element, part: Part, top: int, scale: float) -> None:
    _text(root, 16, top + 20, part.title, "name")
    lanes = {lane: top + 44 + number * (LANE + GAP) for number, lane in enumerate(_lanes(part))}
    for lane, y in lanes.items():
        _text(root, LEFT - 12, y + 15, lane, anchor="end")
        track = {"class": "track", "x": str(LEFT), "y": str(y)}
        SubElement(root, "rect", {**track, "width": str(WIDTH - LEFT - 24), "height": str(LANE)})
    for bar in part.bars:
        x, wide = LEFT + bar.start * scale, (bar.end - bar.start) * scale
        box = {"x": f"{x:.2f}", "y": str(lanes[bar.lane]), "width": f"{wide - 1:.2f}", "height": str(LANE), "fill": bar.colour}
        SubElement(root, "rect", box)
        if bar.text and wide > 7 * len(bar.text):
            _text(root, x + wide / 2, lanes[bar.lane] + 15, bar.text, "on", "middle")
    foot = max(lanes.values()) + LANE + 4
    for (at, name), (following, _) in pairwise([*part.marks, (float("inf"), "")]):
        x = LEFT + at * scale
        SubElement(root, "path", {"class": "step", "d": f"M{x:.2f} {top + 40}V{foot}"})
        narrow = (following - at) * scale < 7 * len(name)
        _text(root, x - 3 if narrow else x + 3, top + 38, name, "dim", "end" if narrow else "start")


def _text(root: Element, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
    if text:
        where = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor}
        SubElement(root, "text", {**where, **({"class": kind} if kind else {})}).text = text


def timelines() -> Iterator[tuple[str, str]]:
    """Of the classic preset and of the four placements, as `rollyard simulate` leaves them."""
    yield "timeline.svg", simulated("--preset", "classic")
    for placement, more in PLACEMENTS.items():
        words = ["--place.placement", placement, *more, "--run.name", placement]
        yield f"pictures/{placement}.svg", simulated(str(ROOT / "examples/placements.toml"), *words)


def simulated(*words: str) -> str:
    """The timeline of `rollyard simulate` with these words."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        out = Path(folder) / "out"
        if cli.main(["simulate", *words, "--out", str(out)]):
            raise SystemExit(f"rollyard simulate {' '.join(words)} failed")
        return (out / "timeline.svg").read_text(encoding="utf-8")


def pictures() -> dict[str, str]:
    """All of them, by the name that they have in docs/."""
    drawn = dict(timelines())
    old_new = [(VERSIONS[0], "written by version 0"), (VERSIONS[1], "written by version 1")]
    rest = [(WAIT, "waits"), (READ, "reads again what it wrote")]
    drawn["pictures/rollover.svg"] = draw(
        "What becomes of requests in flight", [rollover(policy) for policy in ROLLOVERS], [*old_new, *rest]
    )
    colours = [(VERSIONS[number], f"version {number}") for number in range(BATCHES)]
    drawn["pictures/staleness.svg"] = draw("Staleness", [staleness(limit) for limit in (0, 1, 2)], colours)
    legend = [(TRAIN, "train"), (SYNC, "sync"), (PROBE, "probe"), *old_new]
    drawn["pictures/sync.svg"] = draw("A weight sync", [sync()], legend)
    return drawn


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, text in pictures().items():
        (ROOT / "docs" / name).write_text(text, encoding="utf-8")
