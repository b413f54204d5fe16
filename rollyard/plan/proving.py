"""The canary of a simulated run: what `weights.prover` asks of engines, and brings to them, as far as that takes time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from rollyard.events import EngineId
from rollyard.plan.clock import Call, Clock
from rollyard.plan.engines import Engines
from rollyard.types import Activity
from rollyard.watch.spans import SpanLog

if TYPE_CHECKING:
    from rollyard.plan.links import Links

ROLLS: Final = 2  # tensors are moved once, and back


class Proof:
    """Engines first finish what they have, each by itself. Then all are asked, one after the other, before and after each time
    that moved weights are brought to them.

    Args:
        trainer: of the device that copies weights.
        engines: who is asked.
        then: what comes after it.
    """

    def __init__(
        self, clock: Clock, engines: Engines, links: Links, trainer: SpanLog, asked: Sequence[EngineId], then: Call
    ) -> None:
        self._clock, self._engines, self._links, self._trainer = clock, engines, links, trainer
        self._asked, self._then = [engine for engine in asked if not engines[engine].lost], then
        self._rolls = self._under_way = 0

    def begin(self) -> None:
        """It calls `then` at its end."""
        self._under_way, now = 1 + len(self._asked), self._clock.nanoseconds
        self._clock.soon(self._arrived)
        for engine in self._asked:
            self._engines.once_empty(engine, partial(self._emptied, engine, now))

    def _emptied(self, engine: EngineId, begin: int) -> None:
        if self._here(engine):
            self._engines.pause(engine, cut=False)
            if self._clock.nanoseconds > begin:
                self._engines[engine].spans.add(Activity.SYNC, begin, self._clock.nanoseconds, "pause")
                self._mark(engine, "resume")
            self._engines.resume(engine)
        self._arrived()

    def _ask(self) -> None:
        after = self._then if self._rolls == ROLLS else self._roll
        self._clock.after(sum(map(self._links.probe_s, self._asked)), after)

    def _roll(self) -> None:
        self._rolls += 1
        self._timed(self._trainer, "publish", self._links.copy_s, self._copied)

    def _copied(self) -> None:
        self._under_way = 1 + len(self._asked)
        self._clock.after(self._links.deliver_s, self._arrived)
        for engine in self._asked:
            self._timed(self._engines[engine].spans, "prepare", self._links.prepare_s(engine), partial(self._load, engine))

    def _load(self, engine: EngineId) -> None:
        if self._here(engine):
            self._engines.pause(engine, cut=False)
            self._mark(engine, "pause")
            self._timed(self._engines[engine].spans, "load", self._links.load_s(engine), partial(self._loaded, engine))
        else:
            self._arrived()

    def _loaded(self, engine: EngineId) -> None:
        if self._here(engine):
            self._engines.resume(engine)
            self._mark(engine, "resume")
        self._arrived()

    def _mark(self, engine: EngineId, what: str) -> None:
        now = self._clock.nanoseconds
        self._engines[engine].spans.add(Activity.SYNC, now, now, what)

    def _here(self, engine: EngineId) -> bool:
        return engine in self._engines and not self._engines[engine].lost

    def _arrived(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._ask()

    def _timed(self, spans: SpanLog, what: str, seconds: float, then: Callable[[], None]) -> None:
        begin = self._clock.nanoseconds

        def done() -> None:
            spans.add(Activity.SYNC, begin, self._clock.nanoseconds, what)
            then()

        self._clock.after(seconds, done)
