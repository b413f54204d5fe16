"""The placements (PURE): when to generate, sleep, train, publish, evaluate and checkpoint.

`colocated`: all devices do both in turn.

    up -> publish v0 -> roll over -> prove -> evaluate -> generate B groups -> sleep -> train -> checkpoint -> publish -> ...

`separate`: a trainer and engines with devices of their own take turns; the same circle, and nobody sleeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from rollyard.events import (
    BatchTaken,
    BatchTrained,
    BatchWanted,
    Checkpoint,
    Checkpointed,
    EngineDown,
    EngineId,
    EngineSlept,
    EngineUp,
    Evaluate,
    Evaluated,
    Event,
    Finish,
    GenerationClosed,
    GenerationOpened,
    Instruction,
    Prove,
    Proved,
    Publish,
    Published,
    RolloutsCancelled,
    RolloutsFailed,
    RolloutsFinished,
    RolloverDone,
    RolloverFailed,
    RolloverWanted,
    RunBroken,
    Signal,
    Sleep,
    StopRequested,
    Train,
)
from rollyard.types import Group, WeightVersion

Output = Instruction | Signal


class Phase(Enum):
    """What the devices of a run in turns are doing."""

    STARTING = auto()
    SYNCING = auto()
    PROVING = auto()
    EVALUATING = auto()
    GENERATING = auto()
    SLEEPING = auto()
    TRAINING = auto()
    CHECKPOINTING = auto()
    ENDING = auto()
    FINISHING = auto()
    FINISHED = auto()


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long a run is and what happens besides training. `engines` must be up before it starts."""

    steps: int
    engines: int
    evaluate: bool = False  # first and last
    evaluate_every: int = 0  # steps, besides
    checkpoint_every: int = 0  # steps, besides the last
    prove: bool = False  # at the start, that every tensor reaches every engine


class Colocated:
    """Trainer and engines share their devices and take turns."""

    def __init__(self, schedule: Schedule, version: WeightVersion) -> None:
        self._schedule = schedule
        self._version = version
        self._first = version
        self._saved = version  # nothing to save before the first step
        self._evaluated: WeightVersion | None = None
        self._unproved = schedule.prove
        self._phase = Phase.STARTING
        self._engines: set[EngineId] = set()
        self._awake: set[EngineId] = set()
        self._batch: BatchTaken | None = None
        self._ending = ""  # why the run ends once what is under way is done
        self._stopped = False
        self._finish_line: Finish | None = None
        self._handlers: dict[type[Event | Signal], Callable[..., Iterable[Output]]] = {
            EngineUp: self._on_up,
            EngineDown: self._on_down,
            Published: lambda event: (RolloverWanted(event.version),),
            RolloverDone: self._on_rolled_over,
            Proved: self._on_proved,
            Evaluated: self._on_evaluated,
            BatchTaken: self._on_batch,
            EngineSlept: self._on_slept,
            BatchTrained: self._on_trained,
            Checkpointed: self._on_checkpointed,
            RolloutsFinished: self._on_no_more,
            RolloutsFailed: lambda signal: self._finish(signal.cause, failed=True),
            RolloverFailed: lambda signal: self._finish(signal.cause, failed=True),
            StopRequested: self._on_stop,
            RunBroken: lambda event: self._finish(event.cause, failed=event.failed),
        }

    def step(self, message: Event | Signal, now: float) -> list[Output]:
        """Take one event or signal; return what follows from it."""
        handler = self._handlers.get(type(message))
        if handler is None or self._phase is Phase.FINISHED:
            return []
        return list(handler(message))

    # --------------------------------------------------------------------------------------- start, engines

    def _on_up(self, event: EngineUp) -> Iterable[Output]:
        self._engines.add(event.engine)
        self._awake.add(event.engine)
        if self._phase is Phase.STARTING and len(self._engines) == self._schedule.engines:
            yield from self._sync()

    def _on_down(self, event: EngineDown) -> Iterable[Output]:
        self._engines.discard(event.engine)
        self._awake.discard(event.engine)
        if self._phase is Phase.SLEEPING and not self._awake:
            yield from self._train()

    def _sync(self) -> Iterable[Output]:
        self._phase = Phase.SYNCING
        yield Publish(self._version)

    # ------------------------------------------------------------------------------------------ the circle

    def _on_rolled_over(self, _: RolloverDone) -> Iterable[Output]:
        if self._phase is not Phase.SYNCING:
            return
        self._awake = set(self._engines)
        if self._unproved:
            self._phase, self._unproved = Phase.PROVING, False
            yield Prove(self._version)
        else:
            yield from self._begin()

    def _on_proved(self, _: Proved) -> Iterable[Output]:
        if self._phase is Phase.PROVING:
            yield from self._begin()

    def _begin(self) -> Iterable[Output]:
        if self._evaluation_due():
            self._phase = Phase.EVALUATING
            yield Evaluate(self._version)
        else:
            yield from self._generate()

    def _evaluation_due(self) -> bool:
        step, every = self._version.step, self._schedule.evaluate_every
        end = self._version == self._first or step == self._schedule.steps or bool(self._ending)
        wanted = end or (every > 0 and step % every == 0)
        return self._schedule.evaluate and wanted and self._evaluated != self._version

    def _on_evaluated(self, event: Evaluated) -> Iterable[Output]:
        self._evaluated = event.version
        if self._phase is Phase.EVALUATING:
            yield from self._generate()
        elif self._phase is Phase.ENDING:
            yield from self._end(self._ending)

    def _generate(self) -> Iterable[Output]:
        if self._version.step == self._schedule.steps:
            yield from self._end("all steps are done")
            return
        self._phase = Phase.GENERATING
        yield GenerationOpened()
        yield BatchWanted()

    def _on_batch(self, signal: BatchTaken) -> Iterable[Output]:
        self._batch = signal
        self._phase = Phase.SLEEPING
        yield GenerationClosed()
        for engine in sorted(self._engines):
            yield Sleep(engine)

    def _on_slept(self, event: EngineSlept) -> Iterable[Output]:
        self._awake.discard(event.engine)
        if self._phase is Phase.SLEEPING and not self._awake:
            yield from self._train()

    def _train(self) -> Iterable[Output]:
        groups: tuple[Group, ...] = self._batch.groups if self._batch else ()
        self._phase, self._batch = Phase.TRAINING, None
        yield Train(self._version.step, groups)

    def _on_trained(self, event: BatchTrained) -> Iterable[Output]:
        self._version = event.version
        every = self._schedule.checkpoint_every
        if self._ending:
            yield from self._end(self._ending)
        elif event.version.step == self._schedule.steps or (every and event.version.step % every == 0):
            self._phase = Phase.CHECKPOINTING
            yield self._checkpoint()
        else:
            yield from self._sync()

    def _checkpoint(self) -> Checkpoint:
        self._saved = self._version
        return Checkpoint(self._version)

    def _on_checkpointed(self, _: Checkpointed) -> Iterable[Output]:
        if self._ending:
            yield from self._end(self._ending)
        else:
            yield from self._sync()

    # -------------------------------------------------------------------------------------------- the end

    def _on_stop(self, event: StopRequested) -> Iterable[Output]:
        """Training and writing are finished first; generation is cut."""
        self._ending, self._stopped = event.cause, True
        if self._phase not in (Phase.TRAINING, Phase.CHECKPOINTING, Phase.ENDING, Phase.FINISHING):
            yield from self._end(event.cause)

    def _end(self, cause: str) -> Iterable[Output]:
        """Nothing more will be trained: save and judge what was learnt since the last time, then finish."""
        self._ending, self._phase = cause, Phase.ENDING
        yield GenerationClosed()
        if self._saved != self._version:
            yield self._checkpoint()
        elif self._evaluation_due() and not self._stopped:
            yield Evaluate(self._version)
        else:
            yield from self._finish(cause)

    def _finish(self, cause: str, *, failed: bool = False) -> Iterable[Output]:
        """Drop whatever is live; the core answers when it has."""
        self._phase, self._finish_line = Phase.FINISHING, Finish(cause, failed)
        yield RolloutsCancelled()

    def _on_no_more(self, _: RolloutsFinished) -> Iterable[Output]:
        if self._phase is Phase.FINISHING and self._finish_line is not None:
            self._phase = Phase.FINISHED
            yield self._finish_line
        elif self._phase is Phase.GENERATING:
            yield from self._end("the prompts are used up")


class Separate(Colocated):
    """Trainer and engines have devices of their own, and take turns all the same: nothing is ever stale."""

    def _on_batch(self, signal: BatchTaken) -> Iterable[Output]:
        self._batch = signal
        yield GenerationClosed()
        yield from self._train()


MODES: dict[str, type[Colocated]] = {"colocated": Colocated, "separate": Separate}
