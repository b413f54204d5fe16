"""Running totals of a server, as far as they can be seen from what it says."""

from __future__ import annotations

from time import monotonic

from rollyard.engine.sglang.event import News
from rollyard.protocols.devices import Spans
from rollyard.types import EngineStats, Request
from rollyard.watch.spans import Burst, work_for


class Totals:
    """Counts what is heard. A step is an event with new tokens; time is that in which requests ran."""

    def __init__(self, slots: int, spans: Spans) -> None:
        self.slots = slots
        self._burst, self._work = Burst(spans), work_for(0)
        self.server = ""
        self.heard_at = monotonic()
        self._steps = self._generated = self._prefilled = self._shared = self._recomputed = 0
        self._busy_s = self._busy_slot_s = 0.0

    def began(self) -> None:
        """Requests run, and did not before."""
        self.heard_at = monotonic()
        self._burst.go()

    def rest(self) -> None:
        """No request runs any more, or they stand still."""
        self._burst.tick(*self._work)
        self._burst.rest()

    def heard(self, request: Request, news: News, running: int) -> None:
        """One of `running` requests said something."""
        self._work = work_for(request.id.group)
        self._burst.tick(*self._work)
        now = monotonic()
        self._busy_s += now - self.heard_at
        self._busy_slot_s += (now - self.heard_at) * min(running, self.slots)
        self.heard_at = now
        self._steps += bool(news.token_ids)
        self._generated += len(news.token_ids)
        if news.end is not None:
            self._shared += news.meta.cached_tokens
            computed, again = max(news.meta.prompt_tokens - news.meta.cached_tokens, 0), 0
            if request.written_ids:
                again = max(computed - 1, 0)  # the newest token never was computed before
            self._prefilled += computed - again
            self._recomputed += again

    def stats(self) -> EngineStats:
        return EngineStats(
            steps=self._steps,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            shared_tokens=self._shared,
            recomputed_tokens=self._recomputed,
            step_s=self._busy_s,
            decoder=self.server,
            busy_slot_s=self._busy_slot_s,
            slots=self.slots,
        )
