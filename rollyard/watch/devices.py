"""Where the time of every device went (PURE): what it did, or what it waited for.

A device does one thing at a time: where two of its intervals overlap, the moment goes to the one that comes first in
`Activity`. A moment in which it does nothing is a wait, and its cause is what the others do at that moment, the first of
`Cause`. So the seconds of a device add up to the wall time, exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from rollyard.types import Activity, Interval


class Cause(Enum):
    """What a device waits for, the first that goes on elsewhere, the driver included."""

    TRAIN = "train"
    SYNC = "sync"  # weights travel elsewhere
    GENERATE = "generate"  # a trainer waits for it, or an engine for the stragglers of another
    TOOLS = "tools"  # an environment is at work between two answers
    SCORE = "score"
    EVAL = "eval"
    CHECKPOINT = "checkpoint"
    PROMPTS = "prompts"
    RESTART = "restart"
    CALLER = "caller"  # who has not taken the batch yet
    CLOSING = "closing"
    UNEXPLAINED = "unexplained"


ACTIVITIES = tuple(Activity)
CAUSES = {Activity(cause.value): cause for cause in Cause if cause is not Cause.UNEXPLAINED}
PLACES = {activity: place for place, activity in enumerate(ACTIVITIES)}
NEAR, HELD, AWAY = range(len(ACTIVITIES), len(ACTIVITIES) + 3)  # places of what a device does besides, and that it is not there
SYNC, SETUP = PLACES[Activity.SYNC], PLACES[Activity.SETUP]
WAIT_SYNC = list(Cause).index(Cause.SYNC)
EXPLAINED = [(PLACES[activity], place) for place, cause in enumerate(Cause) for activity in CAUSES if CAUSES[activity] is cause]


class Lane(NamedTuple):
    """One device, and what it did. `roles` are of `engine`, `trainer`: both where they share it.

    It was there from `since_ns` on, and until `until_ns`; None: from the start, to the end. It may stand for several
    `devices` that do the same.
    """

    device: str
    roles: tuple[str, ...]
    intervals: Sequence[Interval]
    since_ns: int | None = None
    until_ns: int | None = None
    devices: int = 1


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """The time of one device while it was there, in nanoseconds: sum(busy_ns) + sum(wait_ns) == wall_ns. It may stand for several
    `devices` that did the same at the same times.

    `transfer_ns` is the time in which weights were brought near, `hidden_ns` the part of it in which the device did other
    work. `stall_ns` is what a weight sync held up: from pause to resume, where it did nothing else, or waited for it.
    """

    device: str
    roles: tuple[str, ...]
    wall_ns: int
    busy_ns: Mapping[str, int]  # by activity, those that took none left out
    wait_ns: Mapping[str, int]  # by cause
    busy_share: float  # of the time after setup
    wait_share: Mapping[str, float]  # by cause, of the same
    transfer_ns: int = 0
    hidden_ns: int = 0
    stall_ns: int = 0
    devices: int = 1


@dataclass(frozen=True, slots=True)
class PoolTime:
    """The devices of one role together. Shares are of the time of all of them after setup."""

    role: str
    devices: int
    busy_share: float
    wait_share: Mapping[str, float]  # by cause
    bubble_ns: int  # all of them waited


def account(
    lanes: Sequence[Lane], driver: Sequence[Interval], start_ns: int, end_ns: int
) -> tuple[tuple[DeviceTime, ...], tuple[PoolTime, ...]]:
    """The accounts of every device and of every role, from `start_ns` to `end_ns`.

    Args:
        lanes: the devices. Intervals may overlap and come in any order.
        driver: what goes on besides, such as judging; it explains waits.
    """
    books = [_Book(lane.roles, start_ns) for lane in lanes]
    pools = {role: _Count() for role in sorted({role for lane in lanes for role in lane.roles})}
    for role, pool in pools.items():
        pool.there = sum(role in lane.roles for lane in lanes)
    waited = [0] * len(Cause)  # nanoseconds so far, by what a wait then was for
    going, cause, at = [0] * len(ACTIVITIES), len(Cause) - 1, start_ns
    for time, index, kind, change in (*_edges(lanes, driver, start_ns, end_ns), (end_ns, len(books), SETUP, 0)):
        if time > at:
            waited[cause] += time - at
            for pool in pools.values():
                pool.pass_by(time - at)
            at = time
        if index < len(books):
            books[index].turn(kind, change, at, waited, pools)
        if kind < NEAR:
            going[kind] += change
            cause = next((place for activity, place in EXPLAINED if going[activity]), len(Cause) - 1)
    for book in books:
        book.settle(end_ns, waited)
    devices = tuple(book.close(lane) for book, lane in zip(books, lanes, strict=True))
    return devices, tuple(_pool(role, lanes, devices, pool.bubble_ns) for role, pool in pools.items())


def _edges(lanes: Sequence[Lane], driver: Sequence[Interval], start_ns: int, end_ns: int) -> list[tuple[int, int, int, int]]:
    """When what begins (1) or ends (-1) where, in order. The driver comes after all lanes."""
    everybody = [*(lane.intervals for lane in lanes), driver]
    edges: list[tuple[int, int, int, int]] = []
    bounds = [*(_presence(lane, start_ns, end_ns) for lane in lanes), (start_ns, end_ns)]
    for index, (intervals, (since, until)) in enumerate(zip(everybody, bounds, strict=True)):
        does = [(PLACES[activity], begin, end) for activity, begin, end, _ in intervals]
        prepares = [(NEAR, begin, end) for _, begin, end, what in intervals if what == "prepare"]
        windows = [(HELD, *window) for window in _held(intervals, end_ns)]
        for kind, begin, end in (*does, *prepares, *windows):
            begin, end = max(begin, since), min(end, until)
            if begin < end:
                edges += ((begin, index, kind, 1), (end, index, kind, -1))
        edges += ((at, index, AWAY, change) for at, change in ((start_ns, 1), (since, -1), (until, 1)))
    edges.sort(key=lambda edge: edge[0])
    return edges


def _presence(lane: Lane, start_ns: int, end_ns: int) -> tuple[int, int]:
    """From when to when it was there."""
    since = start_ns if lane.since_ns is None else min(max(lane.since_ns, start_ns), end_ns)
    return since, end_ns if lane.until_ns is None else min(max(lane.until_ns, since), end_ns)


def _held(intervals: Sequence[Interval], end_ns: int) -> Iterator[tuple[int, int]]:
    """From each pause to the resume that follows, or to the end."""
    resumes = sorted(interval.end_ns for interval in intervals if interval.what == "resume")
    until = 0
    for start in sorted(interval.start_ns for interval in intervals if interval.what == "pause"):
        if start >= until:
            at = bisect_right(resumes, start)
            until = resumes[at] if at < len(resumes) else end_ns
            yield start, until


@dataclass(slots=True)
class _Count:
    """Of a role: how many devices are there, and how many of them do something."""

    there: int = 0
    busy: int = 0
    bubble_ns: int = 0

    def pass_by(self, length: int) -> None:
        if self.there and not self.busy:
            self.bubble_ns += length


class _Book:
    """Of one device. Nothing is written but when what it does changes: what it waited for meanwhile, the clocks of causes say."""

    __slots__ = ("_busy", "_doing", "_open", "_roles", "_since_ns", "_wait", "_waited", "hidden_ns", "stall_ns", "transfer_ns")

    def __init__(self, roles: tuple[str, ...], start_ns: int) -> None:
        self._roles = roles
        self._open = [0] * (AWAY + 1)
        self._doing: int | None = None  # place of the activity
        self._since_ns = start_ns
        self._waited = [0] * len(Cause)  # as the clocks were then
        self._busy = [0] * len(ACTIVITIES)
        self._wait = [0] * len(Cause)
        self.transfer_ns = self.hidden_ns = self.stall_ns = 0

    def turn(self, kind: int, change: int, at: int, waited: list[int], pools: Mapping[str, _Count]) -> None:
        """Something begins, or ends."""
        open_ = self._open
        if (open_[kind] > 0) == (open_[kind] + change > 0):
            open_[kind] += change
            return
        self.settle(at, waited)
        if kind in (NEAR, HELD):
            open_[kind] += change
            return
        there, busy = self._shows()
        open_[kind] += change
        self._doing = next((place for place in range(NEAR) if open_[place]), None)
        now_there, now_busy = self._shows()
        if (there, busy) != (now_there, now_busy):
            for role in self._roles:
                pools[role].there += now_there - there
                pools[role].busy += now_busy - busy

    def _shows(self) -> tuple[int, int]:
        """Whether it is there, and does something."""
        there = not self._open[AWAY]
        return int(there), int(there and self._doing is not None)

    def settle(self, at: int, waited: list[int]) -> None:
        """The time since the last change is over."""
        length, self._since_ns = at - self._since_ns, at
        before, self._waited = self._waited, waited.copy()
        if not length or self._open[AWAY]:
            return
        if self._doing is not None:
            self._busy[self._doing] += length
            syncing = length if self._doing == SYNC else 0
        else:
            self._wait = [spent + now - then for spent, now, then in zip(self._wait, waited, before, strict=True)]
            syncing = waited[WAIT_SYNC] - before[WAIT_SYNC]
        if self._open[NEAR]:
            self.transfer_ns += length
            self.hidden_ns += length if self._doing is not None and self._doing != SYNC else 0
        if self._open[HELD]:
            self.stall_ns += syncing

    def close(self, lane: Lane) -> DeviceTime:
        wall_ns = sum(self._busy) + sum(self._wait)
        busy = {kind.value: spent for kind, spent in zip(Activity, self._busy, strict=True) if spent}
        wait = {kind.value: spent for kind, spent in zip(Cause, self._wait, strict=True) if spent}
        shares = _shares(wall_ns, busy, wait)
        parts = self.transfer_ns, self.hidden_ns, self.stall_ns
        return DeviceTime(lane.device, lane.roles, wall_ns, busy, wait, *shares, *parts, lane.devices)


def work(devices: Sequence[DeviceTime]) -> dict[str, float]:
    """What these devices were busy with, as shares of their time after setup, by activity."""
    spent: Counter[str] = Counter()
    for device in devices:
        spent.update({name: nanoseconds * device.devices for name, nanoseconds in device.busy_ns.items()})
    setup = spent.pop(Activity.SETUP.value, 0)
    whole = sum(device.wall_ns * device.devices for device in devices) - setup or 1
    return {name: nanoseconds / whole for name, nanoseconds in spent.items()}


def _shares(wall_ns: int, busy: Mapping[str, int], wait: Mapping[str, int]) -> tuple[float, dict[str, float]]:
    """Busy, and waiting by cause: of the time that is left without setup."""
    setup = busy.get(Activity.SETUP.value, 0)
    whole = wall_ns - setup or 1
    return (sum(busy.values()) - setup) / whole, {cause: spent / whole for cause, spent in wait.items()}


def _pool(role: str, lanes: Sequence[Lane], devices: Sequence[DeviceTime], bubble_ns: int) -> PoolTime:
    busy: Counter[str] = Counter()
    wait: Counter[str] = Counter()
    wall_ns = count = 0
    for lane, device in zip(lanes, devices, strict=True):
        if role in lane.roles:
            busy.update({name: spent * lane.devices for name, spent in device.busy_ns.items()})
            wait.update({name: spent * lane.devices for name, spent in device.wait_ns.items()})
            wall_ns, count = wall_ns + device.wall_ns * lane.devices, count + lane.devices
    return PoolTime(role, count, *_shares(wall_ns, busy, wait), bubble_ns)
