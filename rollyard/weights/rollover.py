"""New weights into every engine (PURE): prepare, pause, load, resume, engine by engine.

The tensors come near while the engine still decodes; from the pause on it gets no request until it takes them again. An
engine that sleeps wakes in a fixed order: weights, load, cache.

No engine is told anything before it has answered what it was told last. A version that failed to reach some of them is
offered to those again once nothing of the failed offer is under way; those that it reached go on meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from enum import Enum, auto

from rollyard.events import (
    Delivered,
    EngineDown,
    EngineHeld,
    EngineId,
    EngineLeft,
    EngineLoaded,
    EnginePaused,
    EnginePrepared,
    EngineReleased,
    EngineResumed,
    EnginesAwaited,
    EngineSlept,
    EnginesMissed,
    EngineUp,
    EngineWoke,
    Event,
    Forget,
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

Output = Instruction | Signal


class Step(Enum):
    """What an engine on its way to a version was told last; ASIDE: it waits for an offer."""

    ASIDE = auto()
    WAKING = auto()
    PREPARING = auto()
    PAUSING = auto()
    LOADING = auto()
    WARMING = auto()  # the cache wakes
    RESUMING = auto()


UNSETTLED = (Step.WAKING, Step.PREPARING, Step.LOADING)  # what may still take, or miss, what was offered


class RolloverMachine:
    """Brings all engines, or some, to a version.

    Args:
        rollover: what happens to requests in flight.
        retries: how often a version that did not reach every engine is offered again.
    """

    def __init__(self, rollover: Rollover, retries: int = 0) -> None:
        self._rollover, self._retries = rollover, retries
        self._asleep: dict[EngineId, bool] = {}  # every engine that is up
        self._still: set[EngineId] = set()  # paused, or with its weights awake: it may load
        self._target: WeightVersion | None = None
        self._steps: dict[EngineId, Step] = {}  # of the engines that have not come to the target
        self._offered: frozenset[EngineId] = frozenset()
        self._sending = False  # the trainer still delivers
        self._causes: list[str] = []  # why the last offer failed; empty while it goes well
        self._died = False  # an engine, since the last version was brought to all or an offer of it failed
        self._failed: WeightVersion | None = None
        self._failures = 0  # of that version
        self._handlers: dict[type[Event | Signal], Callable[..., Iterable[Output]]] = {
            EngineUp: self._on_up,
            EngineDown: self._on_down,
            EngineLeft: self._on_left,
            EngineSlept: self._on_slept,
            RolloverWanted: self._on_wanted,
            Delivered: self._on_delivered,
            EnginePrepared: self._on_prepared,
            EnginePaused: self._on_paused,
            EngineWoke: self._on_woke,
            EngineLoaded: self._on_loaded,
            EngineResumed: self._on_resumed,
            SyncFailed: self._on_failed,
        }

    @property
    def listens(self) -> Container[type[Event | Signal]]:
        """What it takes; nothing follows from anything else."""
        return self._handlers

    def step(self, message: Event | Signal, now: float) -> list[Output]:
        """Take one event or signal; return what follows from it."""
        handler = self._handlers.get(type(message))
        return [] if handler is None else list(handler(message))

    # --------------------------------------------------------------------------------------------- engines

    def _on_up(self, event: EngineUp) -> Iterable[Output]:
        self._asleep[event.engine] = False
        return ()

    def _on_down(self, event: EngineDown) -> Iterable[Output]:
        if self._asleep.pop(event.engine, None) is None:
            return
        self._still.discard(event.engine)
        self._died = True
        yield Forget(event.engine)
        if event.engine in self._steps:
            yield from self._settled(event.engine)

    def _on_left(self, signal: EngineLeft) -> Iterable[Output]:
        """It was let go while nothing was on its way to it."""
        del self._asleep[signal.engine]
        self._still.discard(signal.engine)
        yield Forget(signal.engine)

    def _on_slept(self, event: EngineSlept) -> Iterable[Output]:
        self._asleep[event.engine] = True
        return ()

    # -------------------------------------------------------------------------------------- towards a version

    def _on_wanted(self, signal: RolloverWanted) -> Iterable[Output]:
        if signal.version != self._target or not self._steps:
            engines = [engine for engine in self._asleep if signal.engines is None or engine in signal.engines]
            self._target, self._steps = signal.version, dict.fromkeys(engines, Step.ASIDE)
            self._offered = frozenset(self._steps)
            self._causes.clear()
        self._sending = True
        if not self._steps:  # those that it is for are gone
            yield RolloverDone(signal.version)
        led = [engine for engine, step in self._steps.items() if step is Step.ASIDE and engine in self._offered]
        drains = self._rollover is Rollover.DRAIN
        soon = tuple(engine for engine in led if not drains or self._asleep[engine] or engine in self._still)
        if soon:
            yield EnginesAwaited(soon)
        for engine in led:
            if self._asleep[engine] and engine not in self._still:
                self._steps[engine] = Step.WAKING
                yield EngineHeld(engine)
                yield Wake(engine, WakePart.WEIGHTS)
            else:
                yield self._prepare(engine)

    def _on_prepared(self, event: EnginePrepared) -> Iterable[Output]:
        engine = event.engine
        if self._steps.get(engine) is not Step.PREPARING or event.version != self._target:
            return
        if engine in self._still:
            yield self._load(engine)
        else:
            self._steps[engine] = Step.PAUSING
            yield EngineHeld(engine)
            yield Pause(engine, self._rollover)
        yield from self._offer_again()

    def _on_paused(self, event: EnginePaused) -> Iterable[Output]:
        if self._steps.get(event.engine) is Step.PAUSING:
            self._still.add(event.engine)
            if self._rollover is Rollover.DRAIN:  # nobody knew how long what it held would take
                yield EnginesAwaited((event.engine,))
            yield self._load(event.engine)

    def _on_woke(self, event: EngineWoke) -> Iterable[Output]:
        engine, step = event.engine, self._steps.get(event.engine)
        if event.part is WakePart.WEIGHTS and step is Step.WAKING:
            self._still.add(engine)
            if self._causes:  # what was offered is not there any more
                self._steps[engine] = Step.ASIDE
                yield from self._offer_again()
            else:
                yield self._prepare(engine)
        elif event.part is WakePart.CACHE and step is Step.WARMING:
            self._asleep[engine] = False
            yield self._resume(engine)

    def _on_loaded(self, event: EngineLoaded) -> Iterable[Output]:
        engine = event.engine
        if self._steps.get(engine) is not Step.LOADING or event.version != self._target:
            return
        self._still.discard(engine)
        if self._asleep[engine]:
            self._steps[engine] = Step.WARMING
            yield Wake(engine, WakePart.CACHE)
        else:
            yield self._resume(engine)
        yield from self._offer_again()

    def _on_resumed(self, event: EngineResumed) -> Iterable[Output]:
        if self._steps.get(event.engine) is Step.RESUMING:
            yield EngineReleased(event.engine)
            yield from self._settled(event.engine)

    def _prepare(self, engine: EngineId) -> Instruction:
        assert self._target is not None
        self._steps[engine] = Step.PREPARING
        return Prepare(engine, self._target)

    def _load(self, engine: EngineId) -> Instruction:
        assert self._target is not None
        self._steps[engine] = Step.LOADING
        return Load(engine, self._target)

    def _resume(self, engine: EngineId) -> Instruction:
        self._steps[engine] = Step.RESUMING
        return Resume(engine)

    def _settled(self, engine: EngineId) -> Iterable[Output]:
        """It has the target, or is gone."""
        del self._steps[engine]
        if not self._steps and self._target is not None:
            self._died = False
            yield RolloverDone(self._target)
        yield from self._offer_again()

    # -------------------------------------------------------------------------------------------- failures

    def _on_delivered(self, event: Delivered) -> Iterable[Output]:
        if event.version == self._target:
            self._sending = False
            yield from self._offer_again()

    def _on_failed(self, event: SyncFailed) -> Iterable[Output]:
        if event.engine is None and event.version != self._target:  # it was never offered
            yield from self._retry(event.version, (), event.cause)
            return
        if event.engine is None:
            self._sending = False
        elif self._steps.get(event.engine) in UNSETTLED:
            self._steps[event.engine] = Step.ASIDE
            yield EnginesMissed((event.engine,))
        self._causes.append(event.cause)
        yield from self._offer_again()

    def _offer_again(self) -> Iterable[Output]:
        """Once nothing of an offer that failed is under way: to those that it did not reach."""
        if not self._causes or self._sending or any(step in UNSETTLED for step in self._steps.values()):
            return
        cause = "; ".join(dict.fromkeys(self._causes))
        self._causes.clear()
        missed = tuple(sorted(engine for engine, step in self._steps.items() if step is Step.ASIDE))
        died, self._died = self._died, False
        if missed and self._target is not None:
            self._offered, self._sending = frozenset(missed), True
            if died:  # the others were its victims, which happens once an engine
                yield Publish(self._target, missed)
            else:
                yield from self._retry(self._target, missed, cause)

    def _retry(self, version: WeightVersion, engines: tuple[EngineId, ...], cause: str) -> Iterable[Output]:
        if version != self._failed:
            self._failed, self._failures = version, 0
        self._failures += 1
        if self._failures > self._retries:
            yield RolloverFailed(f"version {version.step} did not reach every engine: {cause}")
        else:
            yield Publish(version, engines)
