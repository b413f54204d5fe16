"""Two halves that trade roles (PURE): one trains batch n, the other generates batch n + 1 with version n; then the other way.

    first half     generate 0, 1        │ train 1           │ generate 3        │ train 3
    second half          train 0        │ generate 2        │ train 2           │ generate 4
    state                               └─ 2nd to 1st       └─ 1st to 2nd       └─ 2nd to 1st

The half that trained has the newest weights at hand and generates next; no weights travel to it. The other takes over the
whole training state before it trains. A batch is written by one version, the newest there was when it was begun.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollyard.events import (
    BatchTrained,
    EngineDown,
    EngineHeld,
    EngineId,
    EngineUp,
    Evaluate,
    HandedOver,
    HandOver,
    Instruction,
    Signal,
    Sleep,
    Train,
)
from rollyard.place.mode import Aside, Doing, Mode, Schedule
from rollyard.types import WeightVersion

Output = Instruction | Signal


class Swap(Mode):
    """Both halves have an engine and a trainer, with one set of parameters."""

    overlaps = True

    def __init__(self, schedule: Schedule, version: WeightVersion) -> None:
        super().__init__(schedule, version)
        self._halves: tuple[EngineId, ...] = ()
        self._learner: EngineId | None = None  # who trains the next batch
        self._newest: EngineId | None = None  # who trained last
        self._handed = version  # what the learner has
        self._handlers[HandedOver] = self._on_handed_over

    @property
    def _current(self) -> tuple[EngineId, ...]:
        """Who has the newest weights: both halves at the start, named by nobody."""
        return () if self._newest is None else (self._newest,)

    def _to_lead(self) -> tuple[EngineId, ...]:
        return self._current

    def _begin_aside(self) -> Iterable[Output]:
        for output in super()._begin_aside():
            yield Evaluate(output.version, self._current) if isinstance(output, Evaluate) else output

    def _held_up(self) -> bool:
        """The learner must not be in the first proof or evaluation, which both halves have part in."""
        return super()._held_up() or (self._newest is None and self._aside is not None)

    def _learn(self) -> Iterable[Output]:
        if self._learner is None:
            self._learner = self._halves[1]
            yield EngineHeld(self._learner)
        yield from super()._learn()

    def _train(self) -> Iterable[Output]:
        learner = self._learner
        assert self._batch is not None and learner is not None
        if learner in self._awake and self._aside is Aside.EVALUATING:
            return  # with this very engine
        if learner in self._led and self._aside is Aside.ROLLING:
            return  # it still comes to an earlier version: a batch of an earlier life needs no generation in between
        if learner in self._awake:
            self._doing = Doing.SLEEPING
            yield EngineHeld(learner)
            yield Sleep(learner)
        elif self._handed != self._trained:
            assert self._newest is not None
            self._doing = Doing.HANDING
            yield HandOver(self._trained, self._newest, learner)
        else:
            groups, self._batch, self._doing = self._batch.groups, None, Doing.TRAINING
            yield Train(self._trained.step, groups, learner)

    # ----------------------------------------------------------------------------------------- what happened

    def _on_up(self, event: EngineUp) -> Iterable[Output]:
        self._halves = tuple(sorted((*self._halves, event.engine)))
        return super()._on_up(event)

    def _on_down(self, event: EngineDown) -> Iterable[Output]:
        yield from self._finish(f"one half is lost: {event.cause}", failed=True)

    def _on_still(self, engine: EngineId) -> Iterable[Output]:
        self._awake.discard(engine)
        if self._doing is Doing.SLEEPING:
            self._doing = Doing.FREE
        return ()

    def _on_handed_over(self, event: HandedOver) -> Iterable[Output]:
        self._handed = event.version
        if self._doing is Doing.HANDING:
            self._doing = Doing.FREE
        return ()

    def _on_trained(self, event: BatchTrained) -> Iterable[Output]:
        """The learner has the newest weights now, and generates; the other half trains next."""
        self._newest = self._learner
        self._learner = next(half for half in self._halves if half != self._newest)
        return super()._on_trained(event)
