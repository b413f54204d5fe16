"""What all placements share (PURE): a start, a trainer that takes batch after batch, weights that follow, an end.

    up -> publish v0 -> roll over -> prove -> evaluate -> [ batch -> train -> save -> publish -> roll over ] -> evaluate -> end

The trainer does one thing at a time (`Doing`), and so do the engines besides generating (`Aside`). After every message the
machine looks what each of them may begin next; how far one waits for the other is what makes a placement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from rollyard.events import (
    BatchTaken,
    BatchTrained,
    BatchWanted,
    Checkpoint,
    Checkpointed,
    EngineDown,
    EngineEmptied,
    EngineId,
    EngineLeaving,
    EngineLeft,
    EngineSlept,
    EngineUp,
    Evaluate,
    Evaluated,
    EvaluationCut,
    Event,
    Finish,
    GenerationClosed,
    GenerationOpened,
    Instruction,
    Prove,
    Proved,
    Publish,
    Published,
    Restart,
    Retire,
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
from rollyard.fitness import EngineProbed, Probe
from rollyard.lives import GroupsRecovered
from rollyard.types import Verdict, WeightVersion

Output = Instruction | Signal

USED_UP = "the prompts are used up"  # why a run ends before its last step


class Doing(Enum):
    """What the trainer does."""

    STARTING = auto()  # not every engine is up
    FREE = auto()
    SLEEPING = auto()  # it waits until every engine sleeps
    HANDING = auto()  # swap: it takes over the training state
    TRAINING = auto()
    SAVING = auto()
    PUBLISHING = auto()
    FINISHING = auto()
    FINISHED = auto()


class Aside(Enum):
    """What the engines do besides generating."""

    ROLLING = auto()
    PROVING = auto()
    EVALUATING = auto()


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long a run is and what happens besides training. `engines` must be up before it starts."""

    steps: int
    engines: int
    evaluate: bool = False  # first and last
    evaluate_every: int = 0  # steps, besides
    checkpoint_every: int = 0  # steps, besides the last
    prove: bool = False  # at the start, that every tensor reaches every engine
    restarts: int = 0  # times each engine that is lost is started again
    probe_every: int = 0  # steps, after which engines are probed beside the trainer's work; 0: only when they took new weights
    evaluated: WeightVersion | None = None  # the last one that was, in an earlier life


class Mode:
    """A placement. Subclasses say how far generation and training wait for each other.

    Args:
        schedule: how long the run is.
        version: what the trainer has at the start.
    """

    overlaps = False  # generation goes on while the trainer works
    shares = False  # trainer and engines have the same devices: engines sleep while it trains

    def __init__(self, schedule: Schedule, version: WeightVersion) -> None:
        self._schedule = schedule
        self._trained = self._saved = version  # nothing to save before the first step
        self._offered: WeightVersion | None = None
        self._rolled: WeightVersion | None = None  # every engine has it
        self._evaluated = schedule.evaluated
        self._evaluated_before: WeightVersion | None = None
        self._unproved = schedule.prove
        self._doing = Doing.STARTING
        self._aside: Aside | None = None
        self._engines: set[EngineId] = set()
        self._restarts: Counter[EngineId] = Counter()
        self._returning: set[EngineId] = set()  # lost, and being started again
        self._returned: set[EngineId] = set()  # up again, or new, without weights
        self._leaving: set[EngineId] = set()
        self._emptied: set[EngineId] = set()  # about to leave: they hold nothing
        self._lost: set[EngineId] = set()  # for good
        self._doubted: set[EngineId] = set()  # they decoded with other weights than they said, once
        self._unretired: set[EngineId] = set()  # lost, and not closed yet
        self._led: tuple[EngineId, ...] = ()  # who is brought to the version on offer; () is all
        self._awake: set[EngineId] = set()
        self._open = self._wanted = False  # generation; a batch
        self._batch: BatchTaken | None = None
        self._stored = 0  # batches of an earlier life that come as soon as they are wanted
        self._ending = ""  # why the run ends once what is under way is done
        self._stopped = False
        self._failing = ""  # why the run fails as soon as what is being trained is trained
        self._finish_line: Finish | None = None
        self._handlers: dict[type[Event | Signal], Callable[..., Iterable[Output]]] = {
            GroupsRecovered: self._on_recovered,
            EngineUp: self._on_up,
            EngineDown: self._on_down,
            EngineLeaving: self._on_leaving,
            EngineEmptied: self._on_emptied,
            EngineSlept: self._on_slept,
            EngineProbed: self._on_probed,
            Published: self._on_published,
            RolloverDone: self._on_rolled_over,
            Proved: self._on_aside_done,
            Evaluated: self._on_aside_done,
            EvaluationCut: self._on_evaluation_cut,
            BatchTaken: self._on_batch,
            BatchTrained: self._on_trained,
            Checkpointed: self._on_checkpointed,
            RolloutsFinished: self._on_no_more,
            RolloutsFailed: lambda signal: self._finish(signal.cause, failed=True),
            RolloverFailed: lambda signal: self._finish(signal.cause, failed=True),
            StopRequested: self._on_stop,
            RunBroken: self._on_broken,
        }

    @property
    def listens(self) -> Container[type[Event | Signal]]:
        """What it takes; nothing follows from anything else."""
        return self._handlers

    def step(self, message: Event | Signal, now: float) -> list[Output]:
        """Take one event or signal; return what follows from it."""
        handler = self._handlers.get(type(message))
        if handler is None or self._doing is Doing.FINISHED:
            return []
        out = list(handler(message))
        out += self._let_go()
        out += self._go_on()
        return out

    # ------------------------------------------------------------------------------------------ what is next

    def _go_on(self) -> Iterable[Output]:
        """What the trainer and the engines, where they are free, begin now."""
        if self._doing is not Doing.FREE:
            return
        if self._save_due():
            self._doing, self._saved = Doing.SAVING, self._trained
            yield Checkpoint(self._trained)
            return
        if self._aside is None and not self._stopped and self._engines:
            yield from self._begin_aside()
        if self._doing is not Doing.FREE:
            return
        if self._last:
            yield from self._close()
            if self._stopped or not (self._aside or (self._returning and not self._engines)):
                yield from self._finish(self._ending or "all steps are done", stopped=self._stopped)
        elif not self._held_up():
            yield from self._learn()

    def _let_go(self) -> Iterable[Output]:
        """Engines that are lost, and those that are to leave and hold nothing, go, unless all do something together just now."""
        if self._aside is not None or self._finish_line is not None:
            return
        for engine in sorted(self._emptied):
            for engines in (self._engines, self._returned, self._awake, self._leaving):
                engines.discard(engine)
            yield EngineLeft(engine)
            yield Retire(engine)
        yield from (Retire(engine, lost=True) for engine in sorted(self._unretired))
        self._emptied.clear()
        self._unretired.clear()

    def _begin_aside(self) -> Iterable[Output]:
        if self._unproved:
            yield from self._close()  # nothing is begun until all are proved
        if self._offered != self._trained or self._returned:
            self._led = self._to_lead()
            if self.overlaps and not self._led:
                yield from self._probe()
            self._doing, self._aside, self._offered = Doing.PUBLISHING, Aside.ROLLING, self._trained
            self._returned.clear()
            yield Publish(self._trained, self._led)
        elif self._unproved:
            self._aside, self._unproved = Aside.PROVING, False
            yield Prove(self._trained)
        elif self._evaluation_due(self._offered):
            self._evaluated_before = self._evaluated
            self._aside, self._evaluated = Aside.EVALUATING, self._offered
            yield Evaluate(self._offered)

    def _to_lead(self) -> tuple[EngineId, ...]:
        """Who needs the newest weights: all, or, where the others have them, those that came back without any."""
        return () if self._offered != self._trained else tuple(sorted(self._returned))

    def _held_up(self) -> bool:
        """Do generation and training wait for what the engines do aside?"""
        if self.overlaps:
            return self._rolled is None or self._unproved or self._aside is Aside.PROVING
        return self._aside is not None

    def _learn(self) -> Iterable[Output]:
        """The trainer takes the batch that is there, or waits for one."""
        if self._batch is not None:
            if self.overlaps:
                yield from self._generate()  # it may be a batch of before a restart, the first thing that there is
            yield from self._train()
            return
        if self.overlaps or not self._stored:
            yield from self._generate()
        if not self._wanted:
            self._wanted = True
            yield BatchWanted()

    def _train(self) -> Iterable[Output]:
        if not self.overlaps:
            yield from self._close()
        if self.shares and self._awake:
            self._doing = Doing.SLEEPING
            yield from (Sleep(engine) for engine in sorted(self._awake))
            return
        assert self._batch is not None
        groups, self._batch, self._doing = self._batch.groups, None, Doing.TRAINING
        yield Train(self._trained.step, groups)
        if not self.overlaps:
            yield from self._probe()

    def _probe(self) -> Iterable[Output]:
        """Once nothing, or as little as can be, will be written with the weights that engines have."""
        every = self._schedule.probe_every
        if every and self._trained.step % every == 0:
            yield from (Probe(engine) for engine in sorted(self._engines - self._returned - self._leaving))

    def _generate(self) -> Iterable[Output]:
        if not self._open:
            self._open = True
            yield GenerationOpened()

    def _close(self) -> Iterable[Output]:
        if self._open:
            self._open = False
            yield GenerationClosed()

    @property
    def _last(self) -> bool:
        """Nothing more will be trained."""
        return bool(self._ending) or self._trained.step == self._schedule.steps

    def _save_due(self) -> bool:
        every = self._schedule.checkpoint_every
        wanted = self._last or (every > 0 and self._trained.step % every == 0)
        return wanted and self._saved != self._trained

    def _evaluation_due(self, version: WeightVersion) -> bool:
        """At first, at last, and whenever a multiple of so many steps was reached since the last time."""
        every, before = self._schedule.evaluate_every, self._evaluated
        if not self._schedule.evaluate or before == version:
            return False
        return before is None or self._last or (every > 0 and version.step // every > before.step // every)

    # ----------------------------------------------------------------------------------------- what happened

    def _on_recovered(self, event: GroupsRecovered) -> Iterable[Output]:
        self._stored = len(event.batches)
        return ()

    def _on_up(self, event: EngineUp) -> Iterable[Output]:
        self._engines.add(event.engine)
        self._awake.add(event.engine)
        again = event.engine in self._returning
        self._returning.discard(event.engine)
        if self._doing is not Doing.STARTING:
            self._unproved = self._unproved or (self._schedule.prove and not again)
            self._returned.add(event.engine)
        elif len(self._engines) == self._schedule.engines:
            self._doing = Doing.FREE
        return ()

    def _on_down(self, event: EngineDown) -> Iterable[Output]:
        engine = event.engine
        if engine not in self._engines | self._returning:
            return  # it left
        leaving = engine in self._leaving
        for engines in (self._engines, self._returning, self._returned, self._leaving, self._emptied):
            engines.discard(engine)
        going_on = not (self._stopped or self._failing) and self._finish_line is None
        if not leaving and going_on and self._restarts[engine] < self._schedule.restarts:
            self._restarts[engine] += 1
            self._returning.add(engine)
            yield Restart(engine)
        else:
            self._lost.add(engine)
            if not self.shares:  # else its process has a trainer too
                self._unretired.add(engine)
            if self._engines <= self._leaving and not self._returning and not self._stopped:
                yield from self._finish(f"no engine is left: {event.cause}", failed=True)
        yield from self._on_still(engine)

    @property
    def lost(self) -> frozenset[EngineId]:
        """Engines that are lost and are not started again."""
        return frozenset(self._lost)

    @property
    def staying(self) -> frozenset[EngineId]:
        """Engines that are up and were not told to leave; none before the run has started."""
        return frozenset() if self._doing is Doing.STARTING else frozenset(self._engines - self._leaving)

    def _on_leaving(self, event: EngineLeaving) -> Iterable[Output]:
        """Raises AssertionError for one that is not there, and for the last: whoever asks looks before."""
        assert event.engine in self.staying and len(self.staying) > 1
        self._leaving.add(event.engine)
        return ()

    def _on_emptied(self, signal: EngineEmptied) -> Iterable[Output]:
        self._emptied.add(signal.engine)
        return ()

    def _on_probed(self, event: EngineProbed) -> Iterable[Output]:
        """One that decodes with other weights than it says is started again, once; after that nothing is believed any more."""
        engine = event.engine
        if event.verdict is not Verdict.CONTRADICTED or engine not in self._engines:
            return
        again, left = engine in self._doubted, self._schedule.restarts - self._restarts[engine]
        self._doubted.add(engine)
        if again or left < 1:
            yield from self._finish(event.cause, failed=True)

    def _on_slept(self, event: EngineSlept) -> Iterable[Output]:
        return self._on_still(event.engine)

    def _on_still(self, engine: EngineId) -> Iterable[Output]:
        self._awake.discard(engine)
        if self._doing is Doing.SLEEPING and not self._awake:
            self._doing = Doing.FREE
        return ()

    def _on_published(self, event: Published) -> Iterable[Output]:
        """What is told late, of an offer that nobody waits for any more, is left alone."""
        if event.version != self._offered or self._aside is not Aside.ROLLING:
            return
        if self._doing is Doing.PUBLISHING:
            self._doing = Doing.FREE
        yield RolloverWanted(event.version, event.engines)

    def _on_rolled_over(self, signal: RolloverDone) -> Iterable[Output]:
        if signal.version != self._offered or self._aside is not Aside.ROLLING:
            return ()
        self._rolled = signal.version
        self._awake.update(self._led or self._engines)
        return self._on_aside_done(signal)

    def _on_aside_done(self, _: RolloverDone | Proved | Evaluated) -> Iterable[Output]:
        self._aside = None
        return ()

    def _on_evaluation_cut(self, _: EvaluationCut) -> Iterable[Output]:
        """It is due again, once there is an engine."""
        self._aside, self._evaluated = None, self._evaluated_before
        return ()

    def _on_batch(self, signal: BatchTaken) -> Iterable[Output]:
        self._batch, self._wanted = signal, False
        self._stored = max(self._stored - 1, 0)
        return ()

    def _on_trained(self, event: BatchTrained) -> Iterable[Output]:
        self._trained, self._doing = event.version, Doing.FREE
        if self._failing:
            yield from self._finish(self._failing, failed=True)

    def _on_checkpointed(self, _: Checkpointed) -> Iterable[Output]:
        if self._doing is Doing.SAVING:
            self._doing = Doing.FREE
        return ()

    # -------------------------------------------------------------------------------------------- the end

    def _on_stop(self, event: StopRequested) -> Iterable[Output]:
        """Training and writing are finished first; the rest is cut."""
        self._ending, self._stopped = event.cause, True
        if self._doing in (Doing.STARTING, Doing.SLEEPING, Doing.HANDING, Doing.PUBLISHING):
            self._doing = Doing.FREE
        return ()

    def _on_no_more(self, _: RolloutsFinished) -> Iterable[Output]:
        if self._finish_line is not None:
            self._doing = Doing.FINISHED
            yield self._finish_line
        elif not self._ending:
            self._ending, self._wanted = USED_UP, False

    def _on_broken(self, event: RunBroken) -> Iterable[Output]:
        """Whatever is under way: nobody will say what came of it."""
        self._doing = Doing.FREE
        return self._finish(event.cause, failed=event.failed, stopped=not event.failed)

    def _finish(self, cause: str, *, failed: bool = False, stopped: bool = False) -> Iterable[Output]:
        """Drop whatever is live; the core answers when it has. What is being trained will be saved: it is trained first."""
        if failed and self._doing is Doing.TRAINING:
            self._failing = self._failing or cause
            return
        self._doing, self._finish_line = Doing.FINISHING, Finish(cause, failed, stopped)
        yield RolloutsCancelled()
