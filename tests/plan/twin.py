"""`engine.fake.FakeEngine` without an event loop: what it writes, and when, behind the seam of modelled engines."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from rollyard.engine.fake import SEGMENT_S, SEGMENT_TOKENS, logprob_of
from rollyard.types import EngineStats, FinishReason, Request, RequestId, Segment, WeightVersion
from rollyard.watch.spans import SpanLog, work_for

Length = Callable[[int, int], int]


@dataclass(eq=False)
class Job:
    request: Request
    rank: tuple[int, int]
    length: int
    written: int
    end: int
    oldest_kv: WeightVersion | None = None
    unsent: list[int] = field(default_factory=list)

    def __lt__(self, other: Job) -> bool:
        return self.rank < other.rank


class TwinEngine:
    """Takes `token_s` for a step, whoever runs."""

    def __init__(self, slots: int, token_s: float, length: Length, spans: SpanLog) -> None:
        self.version: WeightVersion | None = None
        self._slots, self._token_s, self._length, self._spans = slots, token_s, length, spans
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self._arrivals = count()
        self._paused = self._work = False
        self._until = math.inf  # when the step ends that it sleeps through
        self._began = 0.0
        self._flushed_at = 0.0
        self._since: int | None = None
        self._steps = self._generated = self._prefilled = self._recomputed = 0
        self._step_s = self._busy_slot_s = 0.0

    def generate(self, requests: Sequence[Request], now: float) -> None:
        for request in requests:
            written = len(request.written_ids)
            rank = (request.priority, next(self._arrivals))
            length = self._length(request.id.group, request.id.member)
            heappush(self._waiting, Job(request, rank, length, written, written + request.sampling.max_tokens))
        self._note_work(now)

    def abort(self, ids: Sequence[RequestId], now: float) -> list[Segment]:
        segments = self._cut([job for job in self._running + self._waiting if job.request.id in ids])
        self._note_work(now)
        return segments

    def pause(self, now: float, cut: bool) -> list[Segment]:
        segments = self._cut(self._running + self._waiting) if cut else []
        self._paused = True
        segments += self._flush_all(now)
        self._note_work(now)
        return segments

    def resume(self, now: float) -> None:
        self._paused = False
        self._note_work(now)

    def load(self, version: WeightVersion) -> None:
        self.version = version

    def sleep(self) -> None:
        """It has no cache."""

    def settle(self, now: float) -> None:
        """Everything is noted as it is done."""

    @property
    def next_s(self) -> float:
        return self._until

    def advance(self, now: float) -> list[Segment]:
        segments = self._step(now) if self._work else []
        self._until = math.inf
        self._note_work(now)
        return segments

    def stats(self) -> EngineStats:
        return EngineStats(
            steps=self._steps,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            recomputed_tokens=self._recomputed,
            step_s=self._step_s,
            busy_slot_s=self._busy_slot_s,
            slots=self._slots,
        )

    def _step(self, now: float) -> list[Segment]:
        while self._waiting and len(self._running) < self._slots:
            job = heappop(self._waiting)
            job.oldest_kv = self.version
            self._running.append(job)
            request = job.request
            again = len(request.prompt_ids) + len(request.written_ids) - 1 if request.written_ids else 0
            self._recomputed += again
            self._prefilled += len(request.prompt_ids) + len(request.written_ids) - again
        if self._since is not None:
            at = self._spans.now()
            activity, what = work_for(max((job.request.id.group for job in self._running), default=-1))
            self._spans.add(activity, self._since, at, what)
            self._since = at
        segments, running = [], list(self._running)
        for job in running:
            finish = self._one(job)
            if finish is not None or len(job.unsent) >= SEGMENT_TOKENS:
                segments.append(self._flush(job, finish))
            if finish is not None:
                self._running.remove(job)
        if now - self._flushed_at >= SEGMENT_S:
            segments += self._flush_all(now)
        self._steps += 1
        self._step_s += now - self._began
        self._busy_slot_s += len(running) * (now - self._began)
        return segments

    def _one(self, job: Job) -> FinishReason | None:
        if job.written >= job.length:
            return FinishReason.STOP
        job.unsent.append(1)
        job.written += 1
        self._generated += 1
        if job.written == job.length:
            return FinishReason.STOP
        return FinishReason.LENGTH if job.written == job.end else None

    def _cut(self, cut: list[Job]) -> list[Segment]:
        self._running = [job for job in self._running if job not in cut]
        self._waiting = sorted(job for job in self._waiting if job not in cut)
        return [self._flush(job, FinishReason.ABORT) for job in cut]

    def _flush_all(self, now: float) -> list[Segment]:
        self._flushed_at = now
        return [self._flush(job, None) for job in self._running if job.unsent]

    def _flush(self, job: Job, finish: FinishReason | None) -> Segment:
        assert self.version is not None
        ids = tuple(job.unsent)
        job.unsent.clear()
        logprobs = tuple(map(logprob_of, ids))
        return Segment(job.request.id, ids, logprobs, self.version, job.oldest_kv or self.version, finish)

    def _note_work(self, now: float) -> None:
        self._work = bool(self._running or self._waiting) and not self._paused
        if not self._work:
            self._since = None
        elif self._until == math.inf:
            self._until, self._began = now + self._token_s, now
            self._since = self._spans.now() if self._since is None else self._since
