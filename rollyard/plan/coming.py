"""Engines that are lost, come and leave in a simulated run: when is said by the scenario (`failures`)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rollyard import events as ev
from rollyard.conductor import Conductor
from rollyard.driver import Leaving
from rollyard.plan.clock import Clock
from rollyard.plan.engines import Engines


class Run(Protocol):
    """Who takes them in."""

    @property
    def conductor(self) -> Conductor: ...

    @property
    def engines(self) -> Engines: ...

    def post(self, event: ev.Event) -> None: ...

    def add(self, engine: ev.EngineId) -> None: ...


@dataclass(frozen=True, slots=True)
class Failures:
    """Of nodes, each at random times that are exponentially apart.

    Args:
        mean_s: seconds between two of one node, on average; 0: none.
        engines: of a node.
    """

    seed: int = 0
    mean_s: float = 0.0
    engines: int = 1


NONE = Failures()


class Coming:
    """What `fleet` is in a run: orders that engines come or leave, and when a leave has its turn."""

    def __init__(self, run: Run, clock: Clock, failures: Failures) -> None:
        self._run, self._clock, self._failures = run, clock, failures
        self._draws: dict[int, random.Random] = {}  # by node
        self._down = set[int]()  # nodes on which nothing was up when they failed last
        self._failed = 0  # nodes that had an engine then
        self._numbers = itertools.count(sum(1 for _ in run.engines))
        self._leaving = Leaving(lambda: run.conductor.staying, lambda engine, cause: None)
        self._changes: dict[int, int] = {}

    def plan(self, changes: dict[int, int]) -> None:
        """How many come, or leave, once so many steps are trained."""
        self._changes = dict(changes)

    def trained(self, steps: int) -> None:
        """So many steps are trained."""
        change = self._changes.pop(steps, 0)
        for _ in range(change):
            self.add()
        for _ in range(-change):
            self.remove()

    def add(self) -> None:
        self._run.add(f"engine-{next(self._numbers)}")

    def remove(self, engine: ev.EngineId | None = None, cut: bool = False) -> None:
        """Let one go, the newest unless one is named; the last stays."""
        staying = self._run.conductor.staying - self._leaving.engines
        if len(staying) > 1:
            self._run.post(self._leaving.order(engine or max(staying, key=_number), cut))

    def left(self, engine: ev.EngineId) -> None:
        self._leaving.left(engine)

    def turns(self, event: ev.Event) -> Sequence[ev.Event]:
        """What this becomes now, see `driver.Leaving`."""
        return self._leaving.turns(event)

    # ---------------------------------------------------------------------------------------------- nodes that fail

    def came(self, engine: ev.EngineId) -> None:
        """It is on a node, which may fail from now on."""
        node = self._node(engine)
        if self._failures.mean_s and node not in self._draws:
            self._draws[node] = random.Random(f"{self._failures.seed}/node/{node}")
            self._down.add(node)
        if node in self._down:
            self._down.remove(node)
            self._next(node)

    def _next(self, node: int) -> None:
        seconds = self._draws[node].expovariate(1 / self._failures.mean_s)
        self._clock.after(seconds, partial(self._fail, node))
        self._clock.beside += 1

    def _fail(self, node: int) -> None:
        """All that it has goes down at once. The next time is drawn now, or, where nothing was up, once something is again.

        How long ago the last time was makes no difference to when the next one is.
        """
        self._clock.beside -= 1
        names = [seat.name for seat in self._run.engines if self._node(seat.name) == node and not seat.lost]
        self._failed += bool(names)
        for name in names:
            self._run.engines.lose(name, f"node {node} failed")
        if names:
            self._next(node)
        else:
            self._down.add(node)

    @property
    def failures(self) -> str:
        """How many nodes failed, and how many are to be expected in so much time, in words."""
        if not self._failures.mean_s:
            return ""
        expected = len(self._draws) * self._clock.now / self._failures.mean_s
        told = f"{self._failed} failure{'s' * (self._failed != 1)} of {len(self._draws):,} nodes with engines"
        return f"{told}, {expected:.3g} to be expected in {self._clock.now:,.0f} s"

    def _node(self, engine: ev.EngineId) -> int:
        return _number(engine) // self._failures.engines


def _number(engine: ev.EngineId) -> int:
    return int(engine.rpartition("-")[2])
