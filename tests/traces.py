"""A strict reader of trace.json: what readers of traces go by silently is a failed assertion here."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

PHASES = {"M": {"name", "pid", "args"}, "X": {"name", "cat", "pid", "tid", "ts", "dur"}, "i": {"name", "s", "pid", "tid", "ts"}}
COUNTS = {"C": {"name", "pid", "ts", "args"}}
FLOWS = {kind: {"name", "cat", "id", "bp", "pid", "tid", "ts"} for kind in "stf"}


class Slice(NamedTuple):
    """Something that took a while, in nanoseconds from the start of the run."""

    process: str
    lane: str
    name: str
    kind: str
    start_ns: int
    end_ns: int
    args: dict[str, Any]


@dataclass
class Shown:
    """What somebody who opens the trace sees."""

    slices: list[Slice] = field(default_factory=list)
    flows: dict[int, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    left_out: str = ""

    def of(self, kind: str) -> list[Slice]:
        return [each for each in self.slices if each.kind == kind]

    @property
    def trained(self) -> dict[int, set[int]]:
        """Numbers of the prompts whose flows end in each step."""
        found: dict[int, set[int]] = defaultdict(set)
        for way in self.flows.values():
            if way[0].kind == "prompt" and way[-1].kind == "step":
                found[number(way[-1])].add(number(way[0]))
        return dict(found)


def number(each: Slice) -> int:
    return int(each.name.split()[1].strip(","))


def read_strictly(path: Path) -> Shown:
    record = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda found: (_ for _ in ()).throw(ValueError(found)))
    assert set(record) == {"displayTimeUnit", "otherData", "traceEvents"}
    events, end_ns = record["traceEvents"], round(record["otherData"]["end_us"] * 1e3)
    processes, lanes = {}, {}
    for event in events:
        wanted = (PHASES | FLOWS | COUNTS)[event["ph"]]
        assert wanted <= event.keys(), event
        if event["name"] == "process_name":
            assert event["pid"] not in processes, "a process is named once"
            processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            assert (event["pid"], event["tid"]) not in lanes, "a lane is named once"
            lanes[event["pid"], event["tid"]] = event["args"]["name"]
    assert len(set(processes.values())) == len(processes)
    shown = Shown(left_out=record["otherData"].get("left_out", ""))
    open_: dict[tuple[int, int], list[Slice]] = defaultdict(list)
    kinds: dict[int, str] = {}
    last: dict[int, dict[str, Any]] = {}
    for event in sorted((event for event in events if "ts" in event), key=lambda event: event["ts"]):  # a stable sort
        at, where = round(event["ts"] * 1e3), (event["pid"], event.get("tid"))
        assert 0 <= at <= end_ns + 1000, (event, end_ns)  # clocks of a simulation are rounded
        stack = open_[where]
        while stack and stack[-1].end_ns <= at:
            stack.pop()
        if event["ph"] == "X":
            assert event["dur"] > 0 or event["cat"] not in ("prompt", "request", "verdict", "step", "version")
            each = Slice(
                processes[event["pid"]],
                lanes[where],
                event["name"],
                event["cat"],
                at,
                round((event["ts"] + event["dur"]) * 1e3),
                event.get("args", {}),
            )
            assert not stack or each.end_ns <= stack[-1].end_ns, f"{each} ends after {stack[-1]}, in which it begins"
            stack.append(each)
            shown.slices.append(each)
        elif event["ph"] in FLOWS:
            assert stack, f"{event} is of no slice"
            before = last.get(event["id"])
            assert (event["ph"] == "s") == (before is None), "a flow begins once, and before all else"
            assert before is None or before["ph"] != "f", "a flow ends once, and after all else"
            assert before is None or (before["name"], before["cat"]) == (event["name"], event["cat"]), "one flow, one name"
            last[event["id"]], kinds[event["id"]] = event, event["ph"]
            shown.flows[event["id"]].append(stack[-1])
    assert set(kinds.values()) <= {"f"}, "every flow ends"
    return shown
