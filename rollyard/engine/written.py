"""What a request has written and not yet sent, and running totals, for an engine whose steps happen elsewhere."""

from __future__ import annotations

import hashlib
from time import perf_counter

from rollyard.model.tokenizer import StopWatcher
from rollyard.protocols.devices import Spans
from rollyard.types import EngineStats, FinishReason, Request, Segment, WeightVersion
from rollyard.watch.spans import Burst, work_for

SEGMENT_S = 0.2


class Written:
    """Collects the tokens of one request into segments, and says which token is its last.

    Args:
        request: what was asked.
        window: tokens of prompt and completion at most.
        eos_ids: of the model.
        watcher: for its stop strings; it has seen what was written before.
        started: the version when the request came: its oldest keys and values, also where weights change under it.
    """

    __slots__ = ("_left", "_logprobs", "_reason_at_last", "_token_ids", "_watcher", "eos_ids", "request", "room", "started")

    def __init__(
        self, request: Request, window: int, eos_ids: frozenset[int], watcher: StopWatcher | None, started: WeightVersion
    ) -> None:
        sampling = request.sampling
        free = window - len(request.prompt_ids) - len(request.written_ids)
        self.request, self.started, self._watcher = request, started, watcher
        self.eos_ids = frozenset() if sampling.ignore_eos else eos_ids
        self.room = self._left = min(sampling.max_tokens, free)  # tokens
        self._reason_at_last = FinishReason.LENGTH if sampling.max_tokens <= free else FinishReason.CONTEXT
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    @property
    def tokens(self) -> int:
        """How many it wrote."""
        return self.room - self._left

    @property
    def unsent(self) -> int:
        """Tokens."""
        return len(self._token_ids)

    def push(self, token_id: int, logprob: float) -> FinishReason | None:
        """Add a token; the reason if it is the last."""
        self._token_ids.append(token_id)
        self._logprobs.append(logprob)
        self._left -= 1
        if token_id in self.eos_ids or (self._watcher is not None and self._watcher.push(token_id)):
            return FinishReason.STOP
        return None if self._left else self._reason_at_last

    def flush(
        self, version: WeightVersion, finish: FinishReason | None = None, problem: str = "", count: int | None = None
    ) -> Segment:
        """What was not sent yet, all of it or the first `count` tokens, written by `version`."""
        token_ids, logprobs = tuple(self._token_ids[:count]), tuple(self._logprobs[:count])
        del self._token_ids[:count], self._logprobs[:count]
        return Segment(self.request.id, token_ids, logprobs, version, self.started, finish, problem)

    def discard(self) -> None:
        """What was not sent yet never is."""
        self._token_ids.clear()
        self._logprobs.clear()


def seed(request: Request) -> int:
    """63 bits for a generator that belongs to one request: one that goes on elsewhere never draws its beginning again."""
    key = f"{request.seed}/{len(request.written_ids)}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


class Tally:
    """Running totals, as seen from here: tokens that come together count as one step, from the one before to this one."""

    def __init__(self, slots: int, spans: Spans, decoder: str = "") -> None:
        self.decoder = decoder
        self._burst, self._work = Burst(spans), work_for(0)
        self.copied_bytes = 0  # of weights
        self._slots = slots
        self._fresh = 0  # tokens of the step that is coming in
        self._steps = self._generated = self._prefilled = self._shared = self._recomputed = 0
        self._step_s = self._busy_slot_s = 0.0
        self._at = self._flushed_at = perf_counter()

    def began(self) -> None:
        """There is work after a time without."""
        self._at = perf_counter()
        self._burst.go()

    def rest(self) -> None:
        """There is no work any more, or it stands still."""
        self._burst.tick(*self._work)
        self._burst.rest()

    def prompt(self, request: Request, shared: int) -> None:
        """What a request came with was computed; `shared` tokens of it were in the cache."""
        computed, again = len(request.prompt_ids) + len(request.written_ids) - shared, 0
        if request.written_ids:
            again = max(computed - 1, 0)  # the newest token never was computed before
        self._prefilled += computed - again
        self._recomputed += again
        self._shared += shared

    def token(self, request: Request) -> None:
        self._fresh += 1
        self._work = work_for(request.id.group)

    def step(self) -> bool:
        """What came together is complete. True when it is time to send what was written."""
        now = perf_counter()
        if self._fresh:
            elapsed = now - self._at
            self._steps += 1
            self._generated += self._fresh
            self._step_s += elapsed
            self._busy_slot_s += min(self._fresh, self._slots) * elapsed
            self._fresh, self._at = 0, now
            self._burst.tick(*self._work)
        due = now - self._flushed_at >= SEGMENT_S
        if due:
            self._flushed_at = now
        return due

    def stats(self) -> EngineStats:
        return EngineStats(
            steps=self._steps,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            shared_tokens=self._shared,
            recomputed_tokens=self._recomputed,
            step_s=self._step_s,
            copied_bytes=self.copied_bytes,
            decoder=self.decoder,
            busy_slot_s=self._busy_slot_s,
            slots=self._slots,
        )
