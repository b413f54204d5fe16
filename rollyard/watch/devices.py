"""Where the time of every device went (PURE): what it did, or what it waited for.

A device does one thing at a time: where two of its intervals overlap, the moment goes to the one that comes first in
`Activity`. A moment in which it does nothing is a wait, and its cause is what the others do at that moment, the first of
`Cause`. So the seconds of a device add up to the wall time, exactly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    CLOSING = "closing"
    UNEXPLAINED = "unexplained"


State = Activity | Cause
ACTIVITIES = tuple(Activity)
CAUSES = {Activity(cause.value): cause for cause in Cause if cause is not Cause.UNEXPLAINED}
_NEAR, _HELD, _AWAY = "near", "held", "away"  # what a device does besides, and that it is not there


class Lane(NamedTuple):
    """One device, and what it did. `roles` are of `engine`, `trainer`: both where they share it.

    It was there from `since_ns` on, and until `until_ns`; None: from the start, to the end. In a trace of very many it may stand
    for several `devices`.
    """

    device: str
    roles: tuple[str, ...]
    intervals: Sequence[Interval]
    since_ns: int | None = None
    until_ns: int | None = None
    devices: int = 1


class Moment(NamedTuple):
    """A stretch of time in which no device changes what it does."""

    start_ns: int
    end_ns: int
    states: tuple[State | None, ...]  # [devices]; None: it was not there
    near: tuple[bool, ...]  # [devices], weights are being brought near
    held: tuple[bool, ...]  # [devices], between pause and resume


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """The time of one device while it was there, in nanoseconds: sum(busy_ns) + sum(wait_ns) == wall_ns.

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
    books = [_Book() for _ in lanes]
    pools = {
        role: [i for i, lane in enumerate(lanes) if role in lane.roles]
        for role in sorted({role for lane in lanes for role in lane.roles})
    }
    bubbles: Counter[str] = Counter()
    alike: Counter[tuple[tuple[State | None, ...], tuple[bool, ...], tuple[bool, ...]]] = Counter()  # few differ
    for moment in moments(lanes, driver, start_ns, end_ns):
        alike[moment.states, moment.near, moment.held] += moment.end_ns - moment.start_ns
    for (states, near, held), length in alike.items():
        for book, state, comes_near, stands in zip(books, states, near, held, strict=True):
            if state is not None:
                book.enter(length, state, comes_near, stands)
        for role, pool in pools.items():
            there = [states[i] for i in pool if states[i] is not None]
            if there and all(isinstance(state, Cause) for state in there):
                bubbles[role] += length
    devices = tuple(book.close(lane) for book, lane in zip(books, lanes, strict=True))
    return devices, tuple(_pool(role, [devices[i] for i in pool], bubbles[role]) for role, pool in pools.items())


def moments(lanes: Sequence[Lane], driver: Sequence[Interval], start_ns: int, end_ns: int) -> Iterator[Moment]:
    """The whole time in order, without gaps, cut wherever anything begins or ends."""
    everybody = [*(lane.intervals for lane in lanes), driver]
    edges: list[tuple[int, int, str, int]] = []
    bounds = [*(_presence(lane, start_ns, end_ns) for lane in lanes), (start_ns, end_ns)]
    for index, (intervals, (since, until)) in enumerate(zip(everybody, bounds, strict=True)):
        prepares = [(_NEAR, begin, end, what) for _, begin, end, what in intervals if what == "prepare"]
        windows = [(_HELD, *window, "") for window in _held(intervals, end_ns)]
        for kind, begin, end, _ in (*intervals, *prepares, *windows):
            begin, end = max(begin, since), min(end, until)
            if begin < end:
                edges += ((begin, index, kind, 1), (end, index, kind, -1))
        edges += ((at, index, _AWAY, change) for at, change in ((start_ns, 1), (since, -1), (until, 1)))
    edges.sort(key=lambda edge: edge[0])
    open_: list[Counter[str]] = [Counter() for _ in everybody]
    doing: list[Activity | None] = [None for _ in lanes]
    near, held, away = ([False for _ in lanes] for _ in range(3))
    going: Counter[str] = Counter()  # on all of them
    at = start_ns
    for time, index, kind, change in (*edges, (end_ns, -1, "", 0)):
        if time > at:
            cause = next((cause for activity, cause in CAUSES.items() if going[activity]), Cause.UNEXPLAINED)
            yield Moment(at, time, tuple(_state(*one, cause) for one in zip(away, doing, strict=True)), tuple(near), tuple(held))
            at = time
        open_[index][kind] += change
        going[kind] += change
        if 0 <= index < len(lanes):
            own = open_[index]
            doing[index] = next((activity for activity in ACTIVITIES if own[activity]), None)
            near[index], held[index], away[index] = own[_NEAR] > 0, own[_HELD] > 0, own[_AWAY] > 0


def _presence(lane: Lane, start_ns: int, end_ns: int) -> tuple[int, int]:
    """From when to when it was there."""
    since = start_ns if lane.since_ns is None else min(max(lane.since_ns, start_ns), end_ns)
    return since, end_ns if lane.until_ns is None else min(max(lane.until_ns, since), end_ns)


def _state(away: bool, doing: Activity | None, cause: Cause) -> State | None:
    return None if away else doing or cause


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
class _Book:
    """Of one device."""

    spent: Counter[State] = field(default_factory=Counter)
    transfer_ns: int = 0
    hidden_ns: int = 0
    stall_ns: int = 0

    def enter(self, length: int, state: State, near: bool, held: bool) -> None:
        self.spent[state] += length
        self.transfer_ns += length * near
        self.hidden_ns += length * (near and isinstance(state, Activity) and state is not Activity.SYNC)
        self.stall_ns += length * (held and state in (Activity.SYNC, Cause.SYNC))

    def close(self, lane: Lane) -> DeviceTime:
        wall_ns = self.spent.total()
        busy = {kind.value: self.spent[kind] for kind in Activity if self.spent[kind]}
        wait = {kind.value: self.spent[kind] for kind in Cause if self.spent[kind]}
        shares = _shares(wall_ns, busy, wait)
        return DeviceTime(lane.device, lane.roles, wall_ns, busy, wait, *shares, self.transfer_ns, self.hidden_ns, self.stall_ns)


def _shares(wall_ns: int, busy: Mapping[str, int], wait: Mapping[str, int]) -> tuple[float, dict[str, float]]:
    """Busy, and waiting by cause: of the time that is left without setup."""
    setup = busy.get(Activity.SETUP.value, 0)
    whole = wall_ns - setup or 1
    return (sum(busy.values()) - setup) / whole, {cause: spent / whole for cause, spent in wait.items()}


def _pool(role: str, devices: Sequence[DeviceTime], bubble_ns: int) -> PoolTime:
    busy: Counter[str] = Counter()
    wait: Counter[str] = Counter()
    for device in devices:
        busy.update(device.busy_ns)
        wait.update(device.wait_ns)
    shares = _shares(sum(device.wall_ns for device in devices), busy, wait)
    return PoolTime(role, len(devices), *shares, bubble_ns)
