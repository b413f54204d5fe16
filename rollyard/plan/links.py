"""New weights on their way to modelled engines: what `weights.sync` does in a run, with links that only take time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from rollyard import events as ev
from rollyard.config import WeightsConfig
from rollyard.fitness import EngineProbed, Probe
from rollyard.plan.clock import Clock
from rollyard.plan.engines import Engines, Seat
from rollyard.plan.proving import Proof
from rollyard.types import Activity, Sent, Verdict, WeightVersion
from rollyard.watch.recorder import Recorder
from rollyard.watch.spans import SpanLog
from rollyard.watch.timeline import Phase, Timeline

OFFERED = 2  # turns until an answer of a publisher is there


class Links(Protocol):
    """Seconds that bringing weights to engines takes."""

    @property
    def copy_s(self) -> float:
        """Out of the trainer, which cannot train meanwhile."""
        ...

    @property
    def deliver_s(self) -> float:
        """Until the trainer's side has nothing under way any more, beside its work."""
        ...

    @property
    def sent_bytes(self) -> int:
        """That leave the trainer for a version."""
        ...

    def prepare_s(self, engine: ev.EngineId) -> float:
        """Until they are near an engine, beside its work."""
        ...

    def load_s(self, engine: ev.EngineId) -> float:
        """An engine switches to what is near; it stands still."""
        ...

    def probe_s(self, engine: ev.EngineId) -> float: ...

    def sleep_s(self, engine: ev.EngineId) -> float: ...

    def wake_s(self, engine: ev.EngineId) -> float: ...

    def refuses(self, engine: ev.EngineId, version: WeightVersion) -> str:
        """Why an engine does not take a version this time; empty when it does."""
        ...


class Sync:
    """Carries out what the rollover says.

    Args:
        trainer: of the device that copies weights.
        config: of the run.
        post: takes the events.
    """

    def __init__(
        self,
        clock: Clock,
        engines: Engines,
        links: Links,
        trainer: SpanLog,
        config: WeightsConfig,
        post: Callable[[ev.Event], None],
        timeline: Timeline,
        recorder: Recorder,
    ) -> None:
        self._clock, self._engines, self._links, self._trainer = clock, engines, links, trainer
        self._config, self._post, self._timeline, self._recorder = config, post, timeline, recorder
        self._living: set[ev.EngineId] = {seat.name for seat in engines}
        self._copied: WeightVersion | None = None  # last
        self._published: WeightVersion | None = None  # likewise, and offered
        self._compares = False  # there was a version before, which the last one can be told from
        self.actions: dict[type[ev.Instruction], Callable[[Any], None]] = {
            ev.Publish: self._publish,
            ev.Prepare: self._prepare,
            ev.Prove: self._prove,
            ev.Forget: lambda told: self.leave(told.engine),
            ev.Pause: self._pause,
            ev.Load: self._load,
            ev.Resume: self._resume,
            Probe: self._probe,
            ev.Sleep: self._sleep,
            ev.Wake: self._wake,
        }

    def join(self, engine: ev.EngineId) -> None:
        self._living.add(engine)

    def leave(self, engine: ev.EngineId) -> None:
        self._living.discard(engine)

    def _publish(self, told: ev.Publish) -> None:
        version, begin = told.version, self._trainer.now()
        offered = tuple(sorted(self._living.intersection(told.engines) if told.engines else self._living))
        copy_s = 0.0 if told.engines and version == self._copied else self._links.copy_s  # the same bytes are still there
        self._copied = version
        self._timeline.open(Phase.SYNC)

        def copied() -> None:
            self._trainer.add(Activity.SYNC, begin, self._trainer.now(), "publish")
            self._clock.turns(publish, OFFERED)

        def publish() -> None:
            self._compares = self._compares or self._published not in (None, version)
            self._published = version
            self._post(ev.Published(version, offered))
            sent = partial(self._clock.turns, deliver, OFFERED)
            self._clock.soon(partial(self._clock.after, self._links.deliver_s, sent))

        def deliver() -> None:
            self._timeline.close(Phase.SYNC)
            if self._links.sent_bytes:
                self._recorder.sent(Sent(self._links.sent_bytes))
            self._post(ev.Delivered(version))

        self._clock.soon(partial(self._clock.after, copy_s, copied))

    def _prepare(self, told: ev.Prepare) -> None:
        prepared = ev.EnginePrepared(told.engine, told.version)
        self._part(told.engine, "prepare", self._links.prepare_s(told.engine), prepared, waits=True)

    def _pause(self, told: ev.Pause) -> None:
        seat, cut = self._engines[told.engine], told.rollover is ev.Rollover.ABORT
        self._timeline.open(Phase.SYNC)
        begin = 0

        def paused() -> None:
            self._timeline.close(Phase.SYNC)
            if not seat.lost:
                self._engines.pause(told.engine, cut=cut)
                seat.spans.add(Activity.SYNC, begin, seat.spans.now(), "pause")
                self._post(ev.EnginePaused(told.engine))

        def pause() -> None:
            nonlocal begin
            begin = seat.spans.now()  # that it waits for a probe first is no part of it
            if told.rollover is ev.Rollover.DRAIN and not seat.lost:
                self._engines.once_empty(told.engine, paused)
            else:
                paused()

        if seat.probed > self._clock.now:
            self._clock.at(seat.probed, pause)
        else:
            pause()

    def _load(self, told: ev.Load) -> None:
        engine, version = told.engine, told.version

        def loaded(seat: Seat) -> None:
            if cause := self._links.refuses(engine, version):
                self._post(ev.SyncFailed(version, cause, engine))
            else:
                seat.model.load(version)
                self._post(ev.EngineLoaded(engine, version))

        self._part(engine, "load", self._links.load_s(engine), loaded, waits=True)

    def _resume(self, told: ev.Resume) -> None:
        engine, seat = told.engine, self._engines[told.engine]

        def resumed(seat: Seat) -> None:
            if self._config.probe:
                self._looked(seat)
            self._post(ev.EngineResumed(engine))

        if not seat.lost:
            self._engines.resume(engine)
            now = seat.spans.now()
            seat.spans.add(Activity.SYNC, now, now, "resume")
        self._part(engine, "probe", self._looking_s(engine), resumed)

    def _looking_s(self, engine: ev.EngineId) -> float:
        """The first version is not looked at, which has none before it."""
        return self._links.probe_s(engine) if self._config.probe and self._compares else 0.0

    def _probe(self, told: Probe) -> None:
        """Beside its work: it is not slowed down by one request of a token."""
        seat, seconds = self._engines[told.engine], self._looking_s(told.engine)
        seat.probed = self._clock.now + seconds

        def probed() -> None:
            if not seat.lost:
                self._looked(seat)

        self._clock.after(seconds, probed)

    def _looked(self, seat: Seat) -> None:
        """What a sound engine would show."""
        verdict = Verdict.VERIFIED if self._compares else Verdict.UNDECIDABLE
        self._recorder.probed(verdict)
        self._post(EngineProbed(seat.name, verdict))

    def _sleep(self, told: ev.Sleep) -> None:
        """What may still run then is an attempt that was given up: it is cut first."""
        seat = self._engines[told.engine]
        if not seat.lost:
            self._engines.pause(told.engine, cut=True)
            seat.model.sleep()
            seat.spans.add(Activity.SYNC, seat.spans.now(), seat.spans.now(), "pause")
        self._part(told.engine, "sleep", self._links.sleep_s(told.engine), ev.EngineSlept(told.engine))

    def _wake(self, told: ev.Wake) -> None:
        seconds = self._links.wake_s(told.engine) if told.part is ev.WakePart.WEIGHTS else 0.0
        self._part(told.engine, "wake", seconds, ev.EngineWoke(told.engine, told.part))

    def _prove(self, told: ev.Prove) -> None:
        self._timeline.open(Phase.SYNC)

        def proved() -> None:
            self._timeline.close(Phase.SYNC)
            self._post(ev.Proved(told.version))

        Proof(self._clock, self._engines, self._links, self._trainer, sorted(self._living), proved).begin()

    def _part(
        self, engine: ev.EngineId, what: str, seconds: float, then: ev.Event | Callable[[Seat], None], *, waits: bool = False
    ) -> None:
        """Something that an engine does for a sync. Of one that is lost meanwhile nothing is heard.

        Args:
            waits: it takes a turn at least; else what takes no time is done in this one.
        """
        seat, begin = self._engines[engine], self._clock.nanoseconds
        self._timeline.open(Phase.SYNC)

        def done() -> None:
            self._timeline.close(Phase.SYNC)
            if seat.lost:
                return
            seat.spans.add(Activity.SYNC, begin, seat.spans.now(), what)
            if isinstance(then, ev.Event):
                self._post(then)
            else:
                then(seat)

        if seconds > 0 or waits:
            self._clock.after(seconds, done)
        else:
            done()
