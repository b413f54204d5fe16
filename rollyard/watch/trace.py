"""`trace.json`: what every device did, as Chrome trace events, for chrome://tracing, ui.perfetto.dev and `watch.picture`.

A process each device, a line each activity, an instant event each step. Times are microseconds from the run's start. Of
more than FEW devices those that did the same at the same times are one process. Where that still makes more than MOST intervals,
every n-th device of a kind stands for itself and those that follow it: its name and its label say for which. Slots busy and
requests that wait are counters. After the devices come prompts, their requests and verdicts, training steps and weight versions,
joined by flows (`watch.tracks`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from rollyard.durable import writing
from rollyard.errors import JournalError
from rollyard.texts import in_a_line
from rollyard.types import Activity, Interval
from rollyard.watch.devices import Lane
from rollyard.watch.requests import Followed
from rollyard.watch.slots import Stretch
from rollyard.watch.tracks import lines, shown, side_by_side

DRIVER: Final = "driver"  # a lane and its role
OF_DRIVER: Final = (  # shown of it: the rest devices show
    Activity.TOOLS,
    Activity.SCORE,
    Activity.PROMPTS,
    Activity.RESTART,
    Activity.CALLER,
    Activity.CLOSING,
)
FEW: Final = 36  # devices that have a process each, whatever they do
MOST: Final = 2**18  # intervals of a trace: about 30 MB
NOTHING: Final = Followed()
BUSY, QUEUE = "slots busy", "requests waiting"  # counters


class Mark(NamedTuple):
    """The moment at which a step was done."""

    step: int
    at_ns: int


@dataclass(frozen=True, slots=True)
class Traced:
    """What was done from `start_ns` to `end_ns`: the driver's lane and that of each device, and what became of prompts.

    Where it is of several lives, they follow each other without a gap, and `lives` is when each of them but the first begins.
    """

    lanes: tuple[Lane, ...]
    marks: tuple[Mark, ...]
    start_ns: int
    end_ns: int
    followed: Followed = NOTHING
    slots: Sequence[Stretch] = ()  # how full the engines were
    lives: tuple[int, ...] = ()

    @property
    def devices(self) -> int:
        """How many there were."""
        return sum(lane.devices for lane in self.lanes if lane.roles != (DRIVER,))


def write_trace(path: Path, traced: Traced) -> None:
    """One event a line. Raises OSError."""
    traced = replace(bounded(traced), followed=shown(traced.followed))
    other: dict[str, object] = {"end_us": (traced.end_ns - traced.start_ns) / 1e3}
    if left_out := traced.followed.left_out:
        other["left_out"] = left_out
    with writing(path, "w") as file:
        file.write(f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(other)}, "traceEvents": [')
        between = "\n"
        for event in _all(traced):
            file.write(between + event)
            between = ",\n"
        file.write("\n]}\n")


def bounded(traced: Traced, most: int = MOST) -> Traced:
    """At most so many intervals where that can be: lanes alike as one, and then one for several of its kind."""
    lanes = merged = _merged(traced.lanes) if len(traced.lanes) > FEW else list(traced.lanes)
    each = 1
    while sum(len(lane.intervals) for lane in lanes) > most and each < len(merged):
        each *= 2
        lanes = _picked(merged, each)
    return replace(traced, lanes=tuple(lanes))


def few(traced: Traced, most: int) -> Traced:
    """About so many lanes at most, whatever is in them: one for several of its kind."""
    lanes = merged = _merged(traced.lanes) if len(traced.lanes) > most else list(traced.lanes)
    each = 1
    while len(lanes) > most and each < len(merged):
        each *= 2
        lanes = _picked(merged, each)
    return replace(traced, lanes=tuple(lanes))


def _merged(lanes: Sequence[Lane]) -> list[Lane]:
    """Devices that did the same have one lane."""
    alike: dict[object, list[Lane]] = {}
    for lane in lanes:
        alike.setdefault((lane.roles, tuple(lane.intervals), lane.since_ns, lane.until_ns), []).append(lane)
    return [_standing(same, "all alike") for same in alike.values()]


def _picked(lanes: Sequence[Lane], each: int) -> list[Lane]:
    """One for so many of the same roles."""
    pools: dict[tuple[str, ...], list[Lane]] = {}
    for lane in lanes:
        pools.setdefault(lane.roles, []).append(lane)
    return [_standing(pool[at : at + each], "the first of them") for pool in pools.values() for at in range(0, len(pool), each)]


def _standing(lanes: Sequence[Lane], how: str) -> Lane:
    """The first, for all of them."""
    if len(lanes) == 1:
        return lanes[0]
    devices = sum(lane.devices for lane in lanes)
    last = lanes[-1].device.partition(" to ")[2].partition(" (")[0] or lanes[-1].device
    first = lanes[0].device.partition(" to ")[0]
    return lanes[0]._replace(device=f"{first} to {last} ({devices}, {how})", devices=devices)


def _all(traced: Traced) -> Iterator[str]:
    for number, lane in enumerate(traced.lanes):
        yield from map(json.dumps, _events(number, lane, traced.start_ns))
    yield from lines(traced.followed, len(traced.lanes), traced.start_ns)
    for step, at in traced.marks:
        when = (at - traced.start_ns) / 1e3
        yield json.dumps({"ph": "i", "s": "g", "name": f"step {step}", "pid": 0, "tid": 0, "ts": when})
    last = [stretch._replace(start_ns=stretch.end_ns) for stretch in traced.slots[-1:]]  # says when it ends
    for begin, _, busy, queue in (*traced.slots, *last):
        for name, value in ((BUSY, busy), (QUEUE, queue)):
            yield json.dumps({"ph": "C", "name": name, "pid": 0, "ts": (begin - traced.start_ns) / 1e3, "args": {"": value}})


def _events(number: int, lane: Lane, start_ns: int) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": lane.device}}
    labels: dict[str, object] = {"labels": ", ".join(lane.roles), "devices": lane.devices}
    labels |= {
        name: (at - start_ns) / 1e3 for name, at in (("since_us", lane.since_ns), ("until_us", lane.until_ns)) if at is not None
    }
    yield {"ph": "M", "name": "process_labels", "pid": number, "args": labels}
    for line, activity in enumerate(Activity):
        found = [interval for interval in lane.intervals if interval.activity is activity]
        for more, intervals in enumerate(side_by_side(found)):  # what a device does at once has a line each
            tid = line + more * len(Activity)
            named = activity.value if more == 0 else f"{activity} {more + 1}"
            yield {"ph": "M", "name": "thread_name", "pid": number, "tid": tid, "args": {"name": named}}
            for _, begin, end, what in intervals:
                name, at, length = what or activity, (begin - start_ns) / 1e3, (end - begin) / 1e3
                yield {"ph": "X", "name": name, "cat": activity, "pid": number, "tid": tid, "ts": at, "dur": length}


def read_trace(path: Path) -> Traced:
    """The devices of what `write_trace` wrote, with times from 0 on. Raises OSError, or JournalError when it is none."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found, other = record["traceEvents"], record["otherData"]
        heads = {event["pid"]: event["args"] for event in found if event["name"] == "process_labels"}
        names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name" and e["pid"] in heads}
        done: dict[int, list[Interval]] = {number: [] for number in names}
        for event in found:
            if event["ph"] == "X" and event["pid"] in heads:
                what = "" if event["name"] == event["cat"] else event["name"]
                begin, end = _ns(event["ts"]), _ns(event["ts"] + event["dur"])
                done[event["pid"]].append(Interval(Activity(event["cat"]), begin, end, what))
        marks = tuple(Mark(int(e["name"].split()[1]), _ns(e["ts"])) for e in found if e["ph"] == "i")
        lanes = tuple(_lane(name, heads[number], done[number]) for number, name in names.items())
        return Traced(lanes, marks, 0, _ns(other["end_us"]), slots=_slots(found))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise JournalError(f"{path}: not a trace of this version of Rollyard: {in_a_line(error)}") from error


def _slots(found: Sequence[dict[str, Any]]) -> list[Stretch]:
    told = [(_ns(e["ts"]), e["args"][""], e["name"]) for e in found if e["ph"] == "C"]
    busy, queue = ([(at, value) for at, value, of in told if of == name] for name in (BUSY, QUEUE))
    each = zip(pairwise(busy), queue, strict=False)
    return [Stretch(begin, end, share, waiting) for ((begin, share), (end, _)), (_, waiting) in each]


def _lane(name: str, head: dict[str, Any], intervals: list[Interval]) -> Lane:
    since, until = (_ns(head[at]) if at in head else None for at in ("since_us", "until_us"))
    return Lane(name, tuple(head["labels"].split(", ")), intervals, since, until, head["devices"])


def _ns(microseconds: float) -> int:
    return round(microseconds * 1e3)
