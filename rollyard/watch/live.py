"""A run at one moment, for another process to show: what it is at, and what its devices did since that process asked last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pydantic import TypeAdapter

from rollyard.stats import EngineNow
from rollyard.types import Interval
from rollyard.watch.report import Counts, EvalRewards

NONE: Final = Counts(0, 0, {})
NEWS: Final = 2048  # intervals that are told at once, about 100 kB, and moments of steps


class Place(NamedTuple):
    """How far somebody has read the intervals of a lane, which are made anew, with gaps closed, when they are too many."""

    generation: int = 0  # how often that was
    read: int = 0
    changes: int = 0  # of those that were read, as they went on


class LaneNews(NamedTuple):
    """What a lane has beyond the place that was asked for, and what there was of it that goes on.

    An interval with the same activity, part and beginning as one that is known is that one, longer by now. One of another
    generation stands for all that is known of the lane.
    """

    lane: int  # its place among all, which stays the same
    name: str
    roles: tuple[str, ...]
    devices: int
    since_ns: int | None  # it came later
    until_ns: int | None  # it left
    place: Place  # up to where it is told now
    intervals: Sequence[Interval]


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody who looks knows already: nothing, the first time."""

    places: tuple[Place, ...] = ()  # of lanes, from the first on
    marks: int = 0  # steps whose moments are known


class News(NamedTuple):
    """What devices did since somebody looked last. Times are on the run's clock, from `start_ns` to `now_ns`."""

    start_ns: int
    now_ns: int
    built_ns: int | None  # when all stations were built
    marks: Sequence[tuple[int, int]] = ()  # steps that were done since, and when
    lanes: Sequence[LaneNews] = ()
    more: bool = False  # there is more to tell at once


@dataclass(frozen=True, slots=True)
class Glance:
    """What the loop knows of itself, and its books do not."""

    planned: int  # steps
    activity: str  # when empty, what the timeline says
    waiting: str
    slots_busy: float | None
    engines: tuple[EngineNow, ...] = ()
    states: Mapping[str, str] = field(default_factory=dict)
    queue: int = 0
    live: int = 0
    prompts: Counts = NONE
    members: Counts = NONE


@dataclass(frozen=True, slots=True)
class Live:
    """What a run is at. Counts and rewards are of the whole run, seconds and tokens of this life."""

    step: int  # done
    planned: int
    activity: str  # what is going on, such as generate
    waiting: str  # for another job, in words
    wall_s: float
    phases: Mapping[str, float]  # seconds by name, those that are open included
    beside: Mapping[str, float]
    reward_first: float | None  # mean of the first step that has one
    reward_last: float | None
    eval: EvalRewards
    tokens: int  # sampled for rollouts
    tokens_per_s: float  # of generation
    slots_busy: float | None  # mean share of decode slots doing work so far
    engines: tuple[EngineNow, ...]
    states: Mapping[str, str]  # of engines, in words
    queue: int  # requests that no engine has
    live: int  # groups that are under way
    judged: int  # completions for the batch that is gathered
    wanted: int
    prompts: Counts
    members: Counts
    staleness: Mapping[int, int]  # trained tokens by lag
    version: int  # step of the weights that were published last
    eta_s: float | None  # None where nothing tells yet; before the first step it is rough
    lost: tuple[str, ...]  # engines
    canary_s: float = 0.0  # seconds of sync that the canary took; 0 before it is done, and where none is made


@dataclass(frozen=True, slots=True)
class Look:
    """What is answered to one look."""

    live: Live
    news: News


LOOKED: Final = TypeAdapter(Look)
ASKED: Final = TypeAdapter(Asked)
