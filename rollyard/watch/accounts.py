"""Gathers what every device did, for the report and the trace."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Final

from rollyard.protocols.devices import Spans
from rollyard.types import Activity, Interval
from rollyard.watch.devices import DeviceTime, Lane, PoolTime, account
from rollyard.watch.live import Asked, LaneNews, News, Place
from rollyard.watch.requests import Requests
from rollyard.watch.slots import SlotsLog
from rollyard.watch.spans import coarser
from rollyard.watch.timeline import Phase, Timeline
from rollyard.watch.trace import DRIVER, Mark, Traced, write_trace

# What the driver sees of a phase explains why a device waits. Not generation: it holds its requests to the last token,
# also while an engine is idle that should not be; what devices say of it counts.
EXPLAINS: Final = {
    Phase.TRAIN: Activity.TRAIN,  # advantages, packing
    Phase.SYNC: Activity.SYNC,
    Phase.TOOLS: Activity.TOOLS,
    Phase.SCORE: Activity.SCORE,
    Phase.EVAL: Activity.EVAL,
    Phase.CHECKPOINT: Activity.CHECKPOINT,
}
MOST: Final = 2**15  # intervals of a device
ENGINE: Final = "engine"  # roles
TRAINER: Final = "trainer"
SCORER: Final = "scorer"


@dataclass(slots=True)
class _Watched:
    """One device: who works there, and what came of it so far."""

    spans: list[Spans] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    roles: list[str] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)
    newest: dict[tuple[Activity, str], int] = field(default_factory=dict)  # index of the last one of a kind
    grown: dict[int, int] = field(default_factory=dict)  # by index, those that went on: the number of their last change
    changes: int = 0
    since_ns: int | None = None  # it came later
    until_ns: int | None = None  # it left
    devices: int = 1
    generation: int = 0  # of the intervals: how often they were made anew

    def collect(self) -> None:
        """Take what is new. A piece that goes on where the one before ended becomes part of it."""
        for spans in self.spans:
            while new := spans.drain():
                for interval in new:
                    self._take(interval)
        if len(self.intervals) > MOST:
            self.intervals = coarser(self.intervals, MOST // 2, _kind)
            self.newest = {_kind(interval): at for at, interval in enumerate(self.intervals)}
            self.grown, self.changes = {}, 0
            self.generation += 1

    def beyond(self, place: Place, most: int) -> tuple[Place, list[Interval]]:
        """See `LaneNews`: at most so many that are new, and as many that went on since they were told."""
        if place.generation != self.generation or not place.read:  # what is read from now on is told as it is now
            place = Place(self.generation, 0, self.changes)
        until = min(place.read + most, len(self.intervals))
        since = list(takewhile(lambda at: self.grown[at] > place.changes, reversed(self.grown)))[: -most - 1 : -1]
        grown = [self.intervals[at] for at in since if at < place.read]
        changes = self.grown[since[-1]] if since else place.changes
        return Place(self.generation, until, changes), grown + self.intervals[place.read : until]

    def told(self, place: Place) -> bool:
        """There is nothing beyond it."""
        return place.read >= len(self.intervals) and place.changes >= self.changes

    def _take(self, interval: Interval) -> None:
        kind = _kind(interval)
        at = self.newest.get(kind)
        if at is not None and self.intervals[at].end_ns == interval.start_ns:
            self.intervals[at] = self.intervals[at]._replace(end_ns=interval.end_ns)
            self.changes += 1
            self.grown.pop(at, None)
            self.grown[at] = self.changes
        else:
            self.newest[kind] = len(self.intervals)
            self.intervals.append(interval)


def _kind(interval: Interval) -> tuple[Activity, str]:
    return interval.activity, interval.what


class Accounts:
    """The books of all devices of a run. Intervals are kept until the end, about 200 bytes each: MOST of a device, and beyond
    that the shortest gaps within an activity are closed.

    Args:
        timeline: gives the wall time, and the phases that explain waits.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._driver = _Watched([timeline.spans])
        self._devices: list[_Watched] = []
        self._built_ns: int | None = None
        self._marks: list[Mark] = []
        self.requests = Requests()  # told by whoever hears the conductor
        self.slots = SlotsLog()  # likewise

    def watch(self, name: str, role: str, spans: Spans, devices: int = 1) -> None:
        """A station works on a device. Stations with the same `spans` share one; a station that is started again keeps its own.

        Args:
            name: of the station, such as engine-0.
            role: engine or trainer.
            devices: that do the same, and have one account.
        """
        watched = next((each for each in self._devices if name in each.names or spans in each.spans), None)
        if watched is None:
            came = None if self._built_ns is None else self._timeline.spans.now()
            self._devices.append(watched := _Watched(since_ns=came, devices=devices))
        watched.spans += [spans] * (spans not in watched.spans)
        watched.names += [name] * (name not in watched.names)
        watched.roles += [role] * (role not in watched.roles)

    def doing(self, activity: Activity, what: str) -> AbstractContextManager[None]:
        """The time of a block in the driver."""
        return self._timeline.spans.doing(activity, what)

    def left(self, name: str) -> None:
        """A station is no part of the run any more, and its device neither."""
        for watched in self._devices:
            if watched.names == [name]:
                watched.collect()
                watched.until_ns = self._timeline.spans.now()

    def built(self) -> None:
        """All stations are built: what comes before belongs to setup where nobody says otherwise."""
        self._built_ns = self._timeline.spans.now()

    def collect(self) -> None:
        """Take what is new. Cheap, and to be called now and then."""
        for watched in (self._driver, *self._devices):
            watched.collect()

    def tell(self, asked: Asked, most: int) -> News:
        """What is new to somebody who knows so much already: see `news`, and at most so many steps.

        Up to the moment of the timeline's last accounts.
        """
        lanes = self.news(asked.places, most)
        marks = self._marks[asked.marks : asked.marks + most]
        more = self._more(lanes) or asked.marks + len(marks) < len(self._marks)
        return News(*self._timeline.bounds_ns, self._built_ns, marks, lanes, more)

    def news(self, places: Sequence[Place], most: int) -> tuple[LaneNews, ...]:
        """What every lane has beyond these places; lanes that have nothing are left out.

        Lane 0 has the driver's phases, as far as they explain waits, lane 1 what it does besides; devices follow.

        Args:
            places: of as many lanes as are known, from the first on.
            most: intervals in all, about: new ones, and as many that were known and have gone on since.
        """
        self.collect()
        lanes = [self._driver, *self._devices]
        known = [*places, *[Place()] * (len(lanes) + 1 - len(places))]
        each = max(most // (len(lanes) + 1), 1)
        found = [self._phases(known[0], each)]
        for number, (watched, place) in enumerate(zip(lanes, known[1:], strict=True), 1):
            until, intervals = watched.beyond(place, each)
            name, roles = ("+".join(watched.names), tuple(watched.roles)) if number > 1 else (DRIVER, (DRIVER,))
            about = (watched.devices, watched.since_ns, watched.until_ns)
            found.append(LaneNews(number, name, roles, *about, until, intervals))
        new = range(len(places), len(found))
        return tuple(lane for lane in found if lane.intervals or lane.place != known[lane.lane] or lane.lane in new)

    def _phases(self, place: Place, most: int) -> LaneNews:
        """Phases that have ended, and explain waits."""
        timeline, start = self._timeline, self._timeline.bounds_ns[0]
        index = place.read if place.generation == timeline.generation else 0
        ended = timeline.intervals[index : index + most]
        told = [Interval(EXPLAINS[kind], begin + start, end + start) for kind, begin, end in ended if kind in EXPLAINS]
        until = Place(timeline.generation, index + len(ended))
        return LaneNews(0, DRIVER, (DRIVER,), 1, None, None, until, told)

    def _more(self, lanes: Sequence[LaneNews]) -> bool:
        """Is there more than these tell?"""
        watched = (self._driver, *self._devices)
        phases = len(self._timeline.intervals)
        return any(not watched[each.lane - 1].told(each.place) if each.lane else each.place.read < phases for each in lanes)

    def close(self) -> tuple[tuple[DeviceTime, ...], tuple[PoolTime, ...]]:
        """The accounts of devices and of roles, up to the moment of the timeline's last accounts."""
        return account(self._lanes(), self._explaining(), *self._timeline.bounds_ns)

    def seconds(self, activity: Activity, what: str) -> float:
        """Of one part of an activity, over all devices."""
        intervals = [interval for watched in self._devices for interval in watched.intervals]
        return sum(i.end_ns - i.start_ns for i in intervals if i.activity is activity and i.what == what) / 1e9

    def stepped(self, step: int) -> None:
        """A step is done."""
        self._marks.append(Mark(step, self._timeline.spans.now()))

    def traced(self) -> Traced:
        """All that was done, up to now: what the trace and the picture show."""
        self.collect()
        lanes = (Lane(DRIVER, (DRIVER,), self._explaining()), *self._lanes())
        start, until = self._timeline.bounds_ns
        return Traced(lanes, tuple(self._marks), start, until, self.requests.followed(until), self.slots.stretches())

    def write_trace(self, path: Path) -> None:
        """See `watch.trace`. Raises OSError."""
        write_trace(path, self.traced())

    def _lanes(self) -> list[Lane]:
        self.collect()
        start, until = self._timeline.bounds_ns
        setup = Interval(Activity.SETUP, start, until if self._built_ns is None else self._built_ns)
        return [
            Lane("+".join(each.names), tuple(each.roles), (setup, *each.intervals), each.since_ns, each.until_ns, each.devices)
            for each in self._devices
        ]

    def _explaining(self) -> list[Interval]:
        start = self._timeline.bounds_ns[0]
        phases = [
            Interval(EXPLAINS[phase], begin + start, end + start)
            for phase, begin, end in self._timeline.intervals
            if phase in EXPLAINS
        ]
        return [*phases, *self._driver.intervals]
