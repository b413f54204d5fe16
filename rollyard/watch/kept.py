"""`timeline.json`: what was done in all lives of a run up to its last moments, in a small file, also where it was killed."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from rollyard.durable import write_file
from rollyard.errors import JournalError
from rollyard.texts import in_a_line
from rollyard.types import Interval
from rollyard.watch.devices import Lane
from rollyard.watch.heard import LEAST
from rollyard.watch.lanes import fewer
from rollyard.watch.slots import Stretch, thinned
from rollyard.watch.trace import Mark, Traced, read_trace

MOST: Final = 2**13  # intervals of the past, and as many of the present life: about 400 kB each
STRETCHES: Final = 1024  # of slots and queue, of the past


@dataclass(frozen=True, slots=True)
class Kept:
    """Times are from the beginning of the first life on, as if there had been nothing between two lives."""

    clock_ns: int  # when the last life began, on the run's own clock: tells it from others
    whole: bool  # that life has ended, and left a trace
    end_ns: int
    lives: tuple[int, ...]
    marks: tuple[Mark, ...]
    slots: tuple[Stretch, ...]
    lanes: tuple[Lane, ...]

    @property
    def traced(self) -> Traced:
        """All of it."""
        return Traced(self.lanes, self.marks, 0, self.end_ns, slots=self.slots, lives=self.lives)

    @property
    def began_ns(self) -> int:
        """When the last life began."""
        return self.lives[-1] if self.lives else 0

    @property
    def earlier(self) -> Traced:
        """Without the last life."""
        return _until(self.traced, self.began_ns) if self.lives else EMPTY


EMPTY: Final = Traced((), (), 0, 0)
KEPT: Final = TypeAdapter(Kept)


def write_kept(path: Path, earlier: Traced, traced: Traced, *, whole: bool) -> None:
    """Of the present life, after the earlier ones. Raises OSError."""
    all_ = joined(earlier, traced)
    kept = Kept(traced.start_ns, whole, all_.end_ns, all_.lives, all_.marks, tuple(all_.slots), all_.lanes)
    record = {each.name: getattr(kept, each.name) for each in fields(kept)}
    content = json.dumps(record, separators=(",", ":")).encode()  # Pydantic takes longer
    write_file(path, content, at_once=False)


def read_kept(path: Path) -> Kept | None:
    """None where there is none. Raises OSError, or JournalError for something else than `write_kept` wrote."""
    try:
        return KEPT.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise JournalError(f"{path}: not a timeline of this version of Rollyard: {in_a_line(error)}") from error


def traces_last(kept: Kept | None, trace: Path) -> bool:
    """Is there a trace, and is it that of the last life?"""
    return (kept is None or kept.whole) and trace.exists()


def with_trace(kept: Kept | None, trace: Path) -> Traced:
    """With the trace of the last life. Raises OSError, or JournalError where it cannot be read."""
    return joined(EMPTY if kept is None else kept.earlier, read_trace(trace))


def with_news(kept: Kept | None, heard: Traced | None, *, going: bool) -> Traced:
    """With what was heard of a life, whose `start_ns` is on the run's own clock, where that is newer. One of both is there.

    Args:
        going: the run goes on, and that is its present life.
    """
    if kept is None or heard is None:
        found = heard if kept is None else kept.traced
        assert found is not None
        return found
    same = kept.clock_ns == heard.start_ns
    if not same and not going:  # nobody heard a later life
        return kept.traced
    if same and kept.end_ns - kept.began_ns > heard.end_ns - heard.start_ns:
        return kept.traced
    return replace(joined(kept.earlier if same else kept.traced, heard), slots=kept.slots)


def joined(earlier: Traced, later: Traced) -> Traced:
    """The one after the other. A device that only one of them has comes, or leaves, in between."""
    border = earlier.end_ns
    later = _moved(later, border - later.start_ns)
    if border == earlier.start_ns:
        return later
    found = {(lane.device, lane.roles): lane for lane in earlier.lanes}
    lanes = {name: lane._replace(until_ns=border if lane.until_ns is None else lane.until_ns) for name, lane in found.items()}
    for lane in later.lanes:
        name = lane.device, lane.roles
        if name in found:
            intervals, devices = [*found[name].intervals, *lane.intervals], lane.devices
            lanes[name] = found[name]._replace(intervals=intervals, until_ns=lane.until_ns, devices=devices)
        else:
            lanes[name] = lane._replace(since_ns=border if lane.since_ns is None else lane.since_ns)
    return replace(
        later,
        lanes=tuple(lanes.values()),
        marks=(*earlier.marks, *later.marks),
        start_ns=earlier.start_ns,
        slots=[*earlier.slots, *later.slots],
        lives=(*earlier.lives, border, *later.lives),
    )


def coarse(traced: Traced, most: int = MOST) -> Traced:
    """With about so many intervals and half as many steps at most, as what is kept of earlier lives."""
    each = max(most // max(len(traced.lanes), 1), LEAST)
    lanes = [lane._replace(intervals=fewer(lane.intervals, each)) for lane in traced.lanes]
    marks = traced.marks
    while len(marks) > most // 2:
        marks = marks[1::2]
    return replace(traced, lanes=tuple(lanes), marks=marks, slots=thinned(traced.slots, STRETCHES))


def _moved(traced: Traced, by: int) -> Traced:
    """That much later."""
    if not by:
        return traced
    return replace(
        traced,
        lanes=tuple(_moved_lane(lane, by) for lane in traced.lanes),
        marks=tuple(Mark(step, at + by) for step, at in traced.marks),
        start_ns=traced.start_ns + by,
        end_ns=traced.end_ns + by,
        slots=[each._replace(start_ns=each.start_ns + by, end_ns=each.end_ns + by) for each in traced.slots],
        lives=tuple(at + by for at in traced.lives),
    )


def _moved_lane(lane: Lane, by: int) -> Lane:
    since, until = (None if at is None else at + by for at in (lane.since_ns, lane.until_ns))
    intervals = [Interval(kind, begin + by, end + by, what) for kind, begin, end, what in lane.intervals]
    return lane._replace(intervals=intervals, since_ns=since, until_ns=until)


def _until(traced: Traced, end_ns: int) -> Traced:
    """What was before."""
    return replace(
        traced,
        lanes=tuple(_cut(lane, end_ns) for lane in traced.lanes if lane.since_ns is None or lane.since_ns < end_ns),
        marks=tuple(mark for mark in traced.marks if mark.at_ns <= end_ns),
        end_ns=end_ns,
        slots=[each for each in traced.slots if each.end_ns <= end_ns],
        lives=tuple(at for at in traced.lives if at < end_ns),
    )


def _cut(lane: Lane, end_ns: int) -> Lane:
    intervals = [each._replace(end_ns=min(each.end_ns, end_ns)) for each in lane.intervals if each.start_ns < end_ns]
    until = lane.until_ns if lane.until_ns is not None and lane.until_ns < end_ns else None
    return lane._replace(intervals=intervals, until_ns=until)
