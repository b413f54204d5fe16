"""New weights into every engine (PURE): prepare, pause, load, resume, engine by engine.

The tensors come near while the engine still decodes; from the pause on it gets no request until it takes them again. An
engine that sleeps wakes in a fixed order: weights, load, cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rollyard.events import (
    EngineDown,
    EngineHeld,
    EngineId,
    EngineLoaded,
    EnginePaused,
    EnginePrepared,
    EngineReleased,
    EngineResumed,
    EngineSlept,
    EngineUp,
    EngineWoke,
    Event,
    Instruction,
    Load,
    Pause,
    Prepare,
    Publish,
    Resume,
    Rollover,
    RolloverDone,
    RolloverFailed,
    RolloverWanted,
    Signal,
    SyncFailed,
    Wake,
    WakePart,
)
from rollyard.types import WeightVersion


class RolloverMachine:
    """Brings all engines to a version.

    Args:
        rollover: what happens to requests in flight.
        retries: how often a version that did not reach every engine is offered again.
    """

    def __init__(self, rollover: Rollover, retries: int = 0) -> None:
        self._rollover, self._retries = rollover, retries
        self._failed: WeightVersion | None = None
        self._failures = 0  # of that version
        self._asleep: dict[EngineId, bool] = {}  # every engine that is up
        self._changing: set[EngineId] = set()
        self._target: WeightVersion | None = None
        self._handlers: dict[type[Event | Signal], Callable[..., Iterable[Instruction | Signal]]] = {
            EngineUp: self._on_up,
            EngineDown: self._on_down,
            EngineSlept: self._on_slept,
            RolloverWanted: self._on_wanted,
            EnginePrepared: self._on_prepared,
            EnginePaused: lambda event: self._load(event.engine),
            EngineWoke: self._on_woke,
            EngineLoaded: self._on_loaded,
            EngineResumed: self._on_resumed,
            SyncFailed: self._on_failed,
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
            if asleep:
                yield EngineHeld(engine)
                yield Wake(engine, WakePart.WEIGHTS)
            else:
                yield Prepare(engine, signal.version)

    def _on_prepared(self, event: EnginePrepared) -> Iterable[Instruction | Signal]:
        if event.engine not in self._changing or event.version != self._target:
            return
        if self._asleep[event.engine]:
            yield Load(event.engine, event.version)
        else:
            yield EngineHeld(event.engine)
            yield Pause(event.engine, self._rollover)

    def _on_woke(self, event: EngineWoke) -> Iterable[Instruction | Signal]:
        if event.part is WakePart.WEIGHTS:
            if event.engine in self._changing and self._target is not None:
                yield Prepare(event.engine, self._target)
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

    def _on_failed(self, event: SyncFailed) -> Iterable[Instruction | Signal]:
        if event.version != self._failed:
            self._failed, self._failures = event.version, 0
        self._failures += 1
        if self._failures > self._retries:
            yield RolloverFailed(event.cause)
        else:
            yield Publish(event.version)

    def _settled(self, engine: EngineId) -> Iterable[Instruction | Signal]:
        if engine not in self._changing:
            return
        self._changing.discard(engine)
        if not self._changing and self._asleep and self._target is not None:
            yield RolloverDone(self._target)
