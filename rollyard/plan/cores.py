"""Processes that share the processors of one machine, and threads of one process that take turns.

Where every device has a processor of its own, nothing here changes anything. On a machine with fewer processors than processes at
work each gets an equal part of them. In one process only one thread is at work at a time, as Python has it: while the driver
handles what was written, a trainer or an engine in its process stands still.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Protocol

from rollyard.plan.clock import Call, Clock
from rollyard.plan.engines import Model
from rollyard.types import Activity, EngineStats, Request, RequestId, Segment, WeightVersion
from rollyard.watch.spans import SpanLog

DRIVER = "driver"  # the process of a run itself
KEPT = 64  # changes of an engine's speed that are kept before old ones are left behind


@dataclass(frozen=True, slots=True)
class Machine:
    """What the driver's own work takes, and the processors that everybody shares: nothing, and as many as there are processes."""

    cores: int = 0  # 0: every process has its own
    request_s: float = 0.0  # handing out a request
    message_s: float = 0.0  # what becomes of it
    batch_s: float = 0.0  # before a batch is trained on


IDLE = Machine()


class Worker(Protocol):
    """Somebody who needs a processor now and then."""

    process: str

    @property
    def busy(self) -> bool: ...

    def run(self, speed: float) -> None:
        """From now on it gets so much of a processor."""
        ...


class Cores:
    """Who gets how much.

    Args:
        count: processors; 0: as many as anybody wants.
    """

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock, self.count = clock, count
        self._workers: list[Worker] = []
        self._speeds: dict[Worker, float] = {}
        self.driver = Line(self, DRIVER)

    def join(self, worker: Worker) -> None:
        """It is there from now on."""
        self._workers.append(worker)

    def leave(self, worker: Worker) -> None:
        """It is no more."""
        self._workers.remove(worker)
        self.forget(worker)

    def forget(self, worker: Worker) -> None:
        """It begins something new, and is to be told its part."""
        self._speeds.pop(worker, None)

    def settle(self) -> None:
        """Nothing more happens at the moment: who is busy has its part."""
        working = dict.fromkeys(worker for worker in self._workers if worker.busy)
        held = DRIVER if self.driver.busy else None  # threads of this process stand still, but for the driver's own
        busy = {worker: None for worker in working if worker.process != held or worker is self.driver}
        processes = Counter(worker.process for worker in busy)
        part = min(1.0, self.count / len(processes)) if processes else 1.0
        for worker in self._workers:
            if worker not in working:
                self.forget(worker)
                continue
            speed = part / processes[worker.process] if worker in busy else 0.0
            if speed != self._speeds.get(worker):
                self._speeds[worker] = speed
                worker.run(speed)

    @property
    def clock(self) -> Clock:
        return self._clock


class Line:
    """Does one thing after the other, each with so many seconds of a processor.

    Args:
        process: that it is a thread of.
    """

    def __init__(self, cores: Cores, process: str) -> None:
        self.process, self._cores = process, cores
        self._waiting: deque[tuple[float, Call]] = deque()
        self._left = self._since = self._speed = 0.0
        self._then: Call | None = None
        self._order = 0  # a time that was set before counts no more
        if cores.count:
            cores.join(self)

    @property
    def busy(self) -> bool:
        return self._then is not None

    def work(self, seconds: float, then: Call) -> None:
        """Do it once what was asked before is done."""
        if self._then is not None:
            self._waiting.append((seconds, then))
        elif seconds <= 0:
            self._cores.clock.soon(then)
        else:
            self._begin(seconds, then)

    def run(self, speed: float) -> None:
        """See `Worker`."""
        now = self._cores.clock.now
        self._left -= (now - self._since) * self._speed
        self._since, self._speed, self._order = now, speed, self._order + 1
        if speed:
            self._cores.clock.after(max(self._left, 0.0) / speed, partial(self._done, self._order))

    def _begin(self, seconds: float, then: Call) -> None:
        self._left, self._since, self._speed, self._then = seconds, self._cores.clock.now, 0.0, then
        if self._cores.count:
            self._cores.forget(self)
        else:
            self.run(1.0)

    def _done(self, order: int) -> None:
        if order != self._order or self._then is None:
            return
        then, self._then, self._order = self._then, None, self._order + 1
        if self._waiting:
            self._begin(*self._waiting.popleft())
        then()


class Paced:
    """A modelled engine that gets a part of a processor (engines.Model): it has a clock of its own, which goes slower.

    Args:
        make: the model, which notes its work in the spans that it is given, by its own clock.
        spans: where that is noted by everybody's.
        alive: is it still part of the run?
        touch: told that its next word may come at another time.
    """

    def __init__(
        self, make: Callable[[SpanLog], Model], spans: SpanLog, clock: Clock, process: str, alive: Callable[[], bool], touch: Call
    ) -> None:
        self.process, self._clock, self._alive, self._touch = process, clock, alive, touch
        self._real, self._own, self._speeds = [clock.now], [clock.now], [1.0]
        self._model = make(_Translated(spans, self))

    @property
    def version(self) -> WeightVersion | None:
        """See `engines.Model`."""
        return self._model.version

    @property
    def busy(self) -> bool:
        """See `Worker`."""
        return self._alive() and self._model.next_s < inf

    def run(self, speed: float) -> None:
        """See `Worker`."""
        now = self._clock.now
        own = self._at(now)
        self._real.append(now)
        self._own.append(own)
        self._speeds.append(speed)
        self._touch()

    def past(self, own: float) -> None:
        """Nobody asks for a time of its own before this one any more."""
        known = bisect_left(self._own, own) - 2
        if known > KEPT:
            for times in (self._real, self._own, self._speeds):
                del times[:known]

    def _at(self, now: float) -> float:
        return self._own[-1] + (now - self._real[-1]) * self._speeds[-1]

    def real(self, own: float, *, first: bool) -> float:
        """When its own clock said so; where it stood still then, the first or the last moment of that."""
        at = max((bisect_left if first else bisect_right)(self._own, own) - 1, 0)
        speed = self._speeds[at]
        return self._real[at] + ((own - self._own[at]) / speed if speed else 0.0)

    # ------------------------------------------------------------------------------------------ the model

    @property
    def next_s(self) -> float:
        """See `engines.Model`."""
        own, speed = self._model.next_s, self._speeds[-1]
        if own == inf or not speed:
            return inf
        return max(self._real[-1] + (own - self._own[-1]) / speed, self._clock.now)

    def generate(self, requests: Sequence[Request], now: float) -> None:
        self._model.generate(requests, self._at(now))

    def abort(self, ids: Sequence[RequestId], now: float) -> list[Segment]:
        return self._model.abort(ids, self._at(now))

    def pause(self, now: float, cut: bool) -> list[Segment]:
        return self._model.pause(self._at(now), cut)

    def resume(self, now: float) -> None:
        self._model.resume(self._at(now))

    def load(self, version: WeightVersion) -> None:
        self._model.load(version)

    def advance(self, now: float) -> list[Segment]:
        return self._model.advance(self._at(now) * (1 + 1e-12))

    def sleep(self) -> None:
        self._model.sleep()

    def settle(self, now: float) -> None:
        self._model.settle(self._at(now))

    def stats(self) -> EngineStats:
        return self._model.stats()


class _Translated(SpanLog):
    """What an engine says by its own clock, noted by everybody's."""

    def __init__(self, spans: SpanLog, engine: Paced) -> None:
        super().__init__(spans.now)
        self._spans, self._engine = spans, engine

    def add(self, activity: Activity, start_ns: int, end_ns: int, what: str = "") -> None:
        """See `SpanLog`."""
        real = self._engine.real
        start, end = real(start_ns / 1e9, first=False), real(end_ns / 1e9, first=True)
        self._spans.add(activity, int(start * 1e9), int(max(start, end) * 1e9), what)
        self._engine.past(end_ns / 1e9)  # it tells one after the other
