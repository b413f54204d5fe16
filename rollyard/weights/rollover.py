"""New weights into every engine (PURE): pause, load, resume, engine by engine.

An engine that sleeps wakes in a fixed order: weights, load, cache. No engine gets a request between the start of
its change and the moment it takes requests again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rollyard.events import (
    EngineDown,
    EngineHeld,
    EngineId,
    EngineLoaded,
    EnginePaused,
    EngineReleased,
    EngineResumed,
    EngineSlept,
    EngineUp,
    EngineWoke,
    Event,
    Instruction,
    Load,
    Pause,
    Resume,
    Rollover,
    RolloverDone,
    RolloverWanted,
    Signal,
    Wake,
    WakePart,
)
from rollyard.types import WeightVersion


class RolloverMachine:
    """Brings all engines to a version. `rollover` says what happens to requests in flight."""

    def __init__(self, rollover: Rollover) -> None:
        self._rollover = rollover
        self._asleep: dict[EngineId, bool] = {}  # every engine that is up
        self._changing: set[EngineId] = set()
        self._target: WeightVersion | None = None
        self._handlers: dict[type[Event | Signal], Callable[..., Iterable[Instruction | Signal]]] = {
            EngineUp: self._on_up,
            EngineDown: self._on_down,
            EngineSlept: self._on_slept,
            RolloverWanted: self._on_wanted,
            EnginePaused: lambda event: self._load(event.engine),
            EngineWoke: self._on_woke,
            EngineLoaded: self._on_loaded,
            EngineResumed: self._on_resumed,
        }

    def step(self, message: Event | Signal, now: float) -> list[Instruction | Signal]:
        """Take one event or signal; return what follows from it."""
        handler = self._handlers.get(type(message))
        return [] if handler is None else list(handler(message))

    def _on_up(self, event: EngineUp) -> Iterable[Instruction | Signal]:
        self._asleep[event.engine] = False
        return ()

    def _on_down(self, event: EngineDown) -> Iterable[Instruction | Signal]:
        self._asleep.pop(event.engine, None)
        yield from self._settled(event.engine)

    def _on_slept(self, event: EngineSlept) -> Iterable[Instruction | Signal]:
        self._asleep[event.engine] = True
        return ()

    def _on_wanted(self, signal: RolloverWanted) -> Iterable[Instruction | Signal]:
        self._target = signal.version
        self._changing = set(self._asleep)
        for engine, asleep in self._asleep.items():
            yield EngineHeld(engine)
            yield Wake(engine, WakePart.WEIGHTS) if asleep else Pause(engine, self._rollover)

    def _on_woke(self, event: EngineWoke) -> Iterable[Instruction | Signal]:
        if event.part is WakePart.WEIGHTS:
            yield from self._load(event.engine)
        else:
            self._asleep[event.engine] = False
            yield Resume(event.engine)

    def _load(self, engine: EngineId) -> Iterable[Instruction | Signal]:
        if engine in self._changing and self._target is not None:
            yield Load(engine, self._target)

    def _on_loaded(self, event: EngineLoaded) -> Iterable[Instruction | Signal]:
        if event.engine in self._changing:
            yield Wake(event.engine, WakePart.CACHE) if self._asleep[event.engine] else Resume(event.engine)

    def _on_resumed(self, event: EngineResumed) -> Iterable[Instruction | Signal]:
        yield EngineReleased(event.engine)
        yield from self._settled(event.engine)

    def _settled(self, engine: EngineId) -> Iterable[Instruction | Signal]:
        if engine not in self._changing:
            return
        self._changing.discard(engine)
        if not self._changing and self._asleep and self._target is not None:
            yield RolloverDone(self._target)
