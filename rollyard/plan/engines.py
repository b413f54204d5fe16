"""Modelled engines as the driver of a run meets them: requests go to them, what they tell is heard in its turn, some are lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from rollyard.errors import EngineLost
from rollyard.events import EngineDown, EngineId, Event, RequestFailed, SegmentArrived
from rollyard.plan.clock import Call, Clock
from rollyard.types import EngineStats, Request, RequestId, Segment, WeightVersion
from rollyard.watch.spans import SpanLog
from rollyard.watch.timeline import Phase, Timeline


class Model(Protocol):
    """What becomes of requests, and when. Times are seconds on one clock, which never goes back."""

    @property
    def version(self) -> WeightVersion | None: ...

    def generate(self, requests: Sequence[Request], now: float) -> None:
        """Queue them."""
        ...

    def abort(self, ids: Sequence[RequestId], now: float) -> list[Segment]:
        """Cut them: what they wrote, each with finish ABORT. Others than it holds are left alone."""
        ...

    def pause(self, now: float, cut: bool) -> list[Segment]:
        """Stand still; with `cut` everything is aborted, else what was written since it last told is told."""
        ...

    def resume(self, now: float) -> None: ...

    def load(self, version: WeightVersion) -> None: ...

    @property
    def next_s(self) -> float:
        """When it next has something to tell; infinite: never, as things are."""
        ...

    def advance(self, now: float) -> list[Segment]:
        """What it has to tell up to now, in order."""
        ...

    def sleep(self) -> None:
        """Its cache is given back."""
        ...

    def settle(self, now: float) -> None:
        """Count and note what it did up to now."""
        ...

    def stats(self) -> EngineStats: ...


Make = Callable[[EngineId, SpanLog], Model]  # a new engine, which notes its work there
Hear = Callable[[EngineId, Segment], None]


@dataclass(slots=True, eq=False)
class Seat:
    """One engine, from its start to its end."""

    name: EngineId
    model: Model
    spans: SpanLog
    requests: dict[RequestId, None] = field(default_factory=dict)  # that it holds
    counted: set[RequestId] = field(default_factory=set)  # those of rollouts that are not heard to have ended
    told: list[list[Segment]] = field(default_factory=list)  # and not heard yet
    due: float = math.inf
    lost: str = ""  # why
    heard: bool = True  # somebody listens
    emptied: Call | None = None  # who waits until it holds nothing, or is lost
    probed: float = 0.0  # until when it is probed beside its work


class Engines:
    """All engines that there are.

    Args:
        make: a new one.
        post: takes the events.
        private: takes segments of requests outside the rollouts, which have negative groups.
        gone: told that an engine is lost, before anybody else hears of it.
    """

    def __init__(
        self,
        clock: Clock,
        timeline: Timeline,
        make: Make,
        post: Callable[[Event], None],
        private: Hear,
        gone: Callable[[EngineId], None],
    ) -> None:
        self._clock, self._timeline, self._make = clock, timeline, make
        self._post, self._private, self._gone = post, private, gone
        self._seats: dict[EngineId, Seat] = {}
        self._touched: dict[EngineId, None] = {}  # whose next word may come at another time now
        self.past: list[EngineStats] = []  # of those that are no more

    def __getitem__(self, engine: EngineId) -> Seat:
        return self._seats[engine]

    def __contains__(self, engine: EngineId) -> bool:
        return engine in self._seats

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats.values())

    def start(self, engine: EngineId, spans: SpanLog) -> Seat:
        """A new one, or one in the place of one that was lost, whose totals are kept."""
        if engine in self._seats:
            self.past.append(self._seats[engine].model.stats())
        seat = self._seats[engine] = Seat(engine, self._make(engine, spans), spans)
        return seat

    def close(self, engine: EngineId) -> None:
        """It is no part of the run any more."""
        seat = self._seats.pop(engine)
        seat.lost, seat.heard = seat.lost or "it has left", False
        self.past.append(seat.model.stats())

    def note(self, now: float) -> None:
        """What all did up to now is in their books."""
        for seat in self:
            if not seat.lost:
                seat.model.settle(now)

    def stats(self) -> list[EngineStats]:
        """Of all that there were."""
        return [*self.past, *(seat.model.stats() for seat in self)]

    # ------------------------------------------------------------------------------------------- requests

    def generate(self, engine: EngineId, requests: Sequence[Request]) -> None:
        """One that is lost, which nobody has heard of yet, refuses them."""
        seat, open_ = self._seats[engine], self._timeline.open
        if seat.lost:
            error = EngineLost(f"engine {engine} is lost: {seat.lost}")
            for request in requests:
                self._post(RequestFailed(engine, request.id, str(error), error.retryable))
            return
        seat.model.generate(requests, self._clock.now)
        self._touched[engine] = None
        for request in requests:
            seat.requests[request.id] = None
            if request.id.group >= 0:
                seat.counted.add(request.id)
                open_(Phase.GENERATE)

    def abort(self, engine: EngineId, ids: Sequence[RequestId]) -> None:
        """What it does not hold any more is left alone, and so is what was asked of one that has left meanwhile."""
        seat = self._seats.get(engine)
        if seat is not None and not seat.lost:
            self._tell(seat, seat.model.abort(ids, self._clock.now))

    def pause(self, engine: EngineId, *, cut: bool) -> None:
        seat = self._seats[engine]
        self._tell(seat, seat.model.pause(self._clock.now, cut))

    def resume(self, engine: EngineId) -> None:
        self._seats[engine].model.resume(self._clock.now)
        self._touched[engine] = None

    def once_empty(self, engine: EngineId, call: Call) -> None:
        """At once where it holds nothing."""
        seat = self._seats[engine]
        if seat.requests:
            seat.emptied = call
        else:
            call()

    def lose(self, engine: EngineId, cause: str) -> None:
        """It is gone, and what it had not told with it."""
        seat = self._seats[engine]
        if seat.lost:
            return
        seat.model.settle(self._clock.now)
        seat.lost, seat.due = cause, math.inf
        seat.requests.clear()
        self._clock.soon(partial(self._listen, seat))
        self._empty(seat)

    # ------------------------------------------------------------------------------------------------ time

    def touch(self, engine: EngineId) -> None:
        """Its next word may come at another time now."""
        self._touched[engine] = None

    def settle(self) -> None:
        """Nothing more happens at the moment: look when each will next have something to tell."""
        for name in self._touched:
            seat = self._seats.get(name)
            if seat is None or seat.lost:
                continue
            due = seat.model.next_s
            if due != seat.due:
                seat.due = due
                if due < math.inf:
                    self._clock.at(due, partial(self._advance, seat, due))
        self._touched.clear()

    def _advance(self, seat: Seat, due: float) -> None:
        if seat.due != due:
            return  # it was another time, then
        seat.due = math.inf
        self._tell(seat, seat.model.advance(self._clock.now))

    def _tell(self, seat: Seat, segments: list[Segment]) -> None:
        """It is heard in its turn. Whoever waits until the engine is empty comes after that."""
        self._touched[seat.name] = None
        if not segments:
            return
        if not seat.told:
            self._clock.soon(partial(self._listen, seat))
        seat.told.append(segments)
        for segment in segments:
            if segment.finish is not None:
                seat.requests.pop(segment.request, None)
        if not seat.requests:
            self._empty(seat)

    def _empty(self, seat: Seat) -> None:
        if seat.emptied is not None:
            self._clock.soon(seat.emptied)
            seat.emptied = None

    def _listen(self, seat: Seat) -> None:
        if not seat.heard:
            return
        name, post = seat.name, self._post
        told, seat.told = seat.told, []
        for segments in told:
            for segment in segments:
                if segment.request.group < 0:
                    self._private(name, segment)
                    continue
                if segment.finish is not None and segment.request in seat.counted:
                    seat.counted.discard(segment.request)
                    self._timeline.close(Phase.GENERATE)
                post(SegmentArrived(name, segment))
        if seat.lost:
            self._lose(seat)

    def _lose(self, seat: Seat) -> None:
        seat.heard = False
        for _ in seat.counted:
            self._timeline.close(Phase.GENERATE)
        seat.counted.clear()
        cause = str(EngineLost(f"engine {seat.name} is lost: {seat.lost}"))
        self._gone(seat.name)
        self._post(EngineDown(seat.name, cause))
