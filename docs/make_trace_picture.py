"""Draws some steps of a run's trace.json as Perfetto shows them: lanes of prompts, requests, verdicts, training, weights, and the
flows of one prompt.

    python docs/make_trace_picture.py runs/NAME/trace.json docs/trace.svg --steps 3-5
"""

import argparse
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

WIDTH, LEFT, LANE, GAP, HEAD = 1200, 170, 13, 2, 20
COLOURS = {"prompt": "#8a63d2", "request": "#4a8fe0", "verdict": "#27aeb0", "step": "#3f9e63", "version": "#c25bc4"}
STYLE = """
text { font: 11px system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #24292f }
.paper { fill: #ffffff } .track { fill: #eceff2 } .name { font-weight: 600 } .in { fill: #ffffff; font-size: 9px }
.flow { stroke: #d9534f; stroke-width: 1.3; fill: none } .dim { fill: #656d76 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .paper { fill: #0d1117 } .track { fill: #21262d } .dim { fill: #9198a1 }
}
"""
Slice = dict[str, Any]


class Drawing:
    """What lies between two moments (microseconds), with the flows of one prompt."""

    def __init__(self, events: list[Slice], start: float, end: float) -> None:
        self._start, self._scale = start, (WIDTH - LEFT - 16) / (end - start)
        self._names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self._lanes: dict[int, dict[int, list[Slice]]] = defaultdict(lambda: defaultdict(list))
        for event in events:
            if event["ph"] == "X" and event["cat"] in COLOURS and event["ts"] < end and event["ts"] + event["dur"] > start:
                self._lanes[event["pid"]][event["tid"]].append(event)
        self._places: dict[tuple[int, int, float], float] = {}  # where each slice begins, from the top

    def svg(self, title: str, flows: list[list[Slice]]) -> str:
        rows = sum(len(lanes) * (LANE + GAP) + HEAD for lanes in self._lanes.values())
        root = Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {WIDTH} {rows + 60}", role="img")
        SubElement(root, "title").text = title
        SubElement(root, "style").text = STYLE
        SubElement(root, "rect", {"class": "paper", "width": "100%", "height": "100%"})
        SubElement(root, "text", {"x": "16", "y": "22", "class": "name"}).text = title
        y = 40
        for pid in sorted(self._lanes):
            SubElement(root, "text", {"x": "16", "y": str(y + 11), "class": "name"}).text = self._names[pid]
            for tid in sorted(self._lanes[pid]):
                SubElement(root, "rect", self._box(LEFT, y, WIDTH - LEFT - 16) | {"class": "track"})
                for each in self._lanes[pid][tid]:
                    self._slice(root, each, y)
                y += LANE + GAP
            y += HEAD
        for way in flows:
            for one, other in pairwise(way):
                self._arrow(root, one, other)
        indent(root)
        return tostring(root, encoding="unicode") + "\n"

    def _box(self, x: float, y: float, width: float) -> dict[str, str]:
        return {"x": f"{x:.1f}", "y": str(y), "width": f"{max(width, 1.5):.1f}", "height": str(LANE), "rx": "2"}

    def _slice(self, root: Element, each: Slice, y: int) -> None:
        begin, end = self._x(each["ts"]), self._x(each["ts"] + each["dur"])
        SubElement(root, "rect", self._box(begin, y, end - begin - 0.5) | {"fill": COLOURS[each["cat"]]})
        name = each["name"].replace("prompt ", "").replace(", member ", ".")
        if end - begin > 6 * len(name) + 4:
            SubElement(root, "text", {"x": f"{begin + 3:.1f}", "y": str(y + 10), "class": "in"}).text = name
        self._places[each["pid"], each["tid"], each["ts"]] = y + LANE / 2

    def _x(self, at: float) -> float:
        return min(max(LEFT + (at - self._start) * self._scale, LEFT), WIDTH - 16)

    def _arrow(self, root: Element, one: Slice, other: Slice) -> None:
        places = [self._places.get((each["pid"], each["tid"], each["ts"])) for each in (one, other)]
        if None not in places:
            (x, y), (to, down) = (self._x(one["ts"]), places[0]), (self._x(other["ts"]), places[1])
            bend = max((to - x) / 2, 12)
            SubElement(
                root, "path", {"class": "flow", "d": f"M{x:.1f},{y} C{x + bend:.1f},{y} {to - bend:.1f},{down} {to:.1f},{down}"}
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="trace.json of a run")
    parser.add_argument("picture", type=Path, help="SVG file to write")
    parser.add_argument("--steps", default="3-5", help="which steps (default: 3-5)")
    arguments = parser.parse_args()
    events = json.loads(arguments.trace.read_text(encoding="utf-8"))["traceEvents"]
    first, last = map(int, arguments.steps.split("-"))
    steps = {int(event["name"].split()[1]): event for event in events if event["ph"] == "X" and event["cat"] == "step"}
    start, end = steps[first]["ts"] - 0.35 * steps[first]["dur"], steps[last]["ts"] + 1.6 * steps[last]["dur"]
    ways: dict[int, list[Slice]] = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            ways[event["id"]].append(event)
    ended = [sorted(way, key=lambda each: each["ts"]) for way in ways.values()]
    told = [way for way in ended if way[0]["name"] == "rollout" and way[-1]["ts"] == steps[last]["ts"] and way[0]["ts"] > start]
    chosen = max({way[0]["ts"] for way in told}, key=lambda ts: sum(way[0]["ts"] == ts for way in told))
    lane = next(way[0]["tid"] for way in told if way[0]["ts"] == chosen)
    flows = [way for way in told if (way[0]["ts"], way[0]["tid"]) == (chosen, lane)]
    title = f"Steps {first} to {last} of a run: the flows are those of one prompt, from its admission to the step that trained it"
    arguments.picture.write_text(Drawing(events, start, end).svg(title, flows), encoding="utf-8")


if __name__ == "__main__":
    main()
