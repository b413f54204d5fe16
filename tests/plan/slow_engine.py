"""An engine on a virtual clock that looks at every token: the embedded engine's own scheduler, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from math import inf

from rollyard.engine.embedded.pages import PagePool
from rollyard.engine.embedded.scheduler import Plan, Scheduler, Sequence
from rollyard.plan.engine import EngineCosts
from rollyard.types import FinishReason, Request, RequestId, WeightVersion


@dataclass(frozen=True)
class Told:
    """A segment, and when it was told."""

    at: float
    request: RequestId
    tokens: int
    version: WeightVersion
    oldest_kv: WeightVersion
    finish: FinishReason | None


class Unpadded(Scheduler):
    """Chunks are not padded to the longest of their step; and who got a slot when is known."""

    def __init__(self, pool: PagePool, **options: int | bool) -> None:
        super().__init__(pool, **options)  # type: ignore[arg-type]
        self.seats: dict[Sequence, int] = {}
        self._numbers = count()

    def _chunk_size(self, plan: Plan, pending: int, most: int) -> int:
        return min(pending, min(most, self.step_tokens - len(plan.decodes)) - plan.chunk_tokens)

    def _seat(self, sequence: Sequence) -> bool:
        seated = super()._seat(sequence)
        if seated:
            self.seats[sequence] = next(self._numbers)
        return seated


class SlowEngine:
    """As `EngineModel`, but for `begin`: call it when everything of a moment was handed over."""

    def __init__(
        self,
        slots: int,
        costs: EngineCosts,
        length: Callable[[Request], int],
        *,
        pages: int,
        page_tokens: int,
        step_tokens: int,
        prefill_tokens: int,
        window: int,
        share: bool,
        tell_every: int,
    ) -> None:
        self.scheduler = Unpadded(
            PagePool(pages, page_tokens),
            slots=slots,
            step_tokens=step_tokens,
            prefill_tokens=prefill_tokens,
            window=window,
            share=share,
        )
        self.costs, self.length, self.window = costs, length, window
        self.jobs: dict[RequestId, Sequence] = {}
        self.told_tokens: dict[Sequence, int] = {}
        self.plan: Plan | None = None
        self.until, self.free_at, self.paused = inf, 0.0, False
        self.told: list[Told] = []
        self.steps = self.generated = 0
        self.tell_every = tell_every

    def generate(self, requests: Iterable[Request], now: float) -> None:
        self.go_to(now)
        for request in requests:
            sequence = self.scheduler.submit(request)
            self.jobs[request.id] = sequence
            self.told_tokens[sequence] = len(sequence.tokens)

    def abort(self, requests: Iterable[RequestId], now: float) -> None:
        self.go_to(now)
        self.cut([self.jobs[request] for request in requests if request in self.jobs], now)

    def pause(self, now: float, cut: bool) -> None:
        self.go_to(now)
        self.paused = True
        if cut:
            self.cut(list(self.jobs.values()), now)
        else:
            self.tell_all(now)

    def resume(self, now: float) -> None:
        self.paused = False
        if self.plan is not None and self.until <= now:
            self.commit(now)
        self.begin(now)

    def load(self, version: WeightVersion) -> None:
        self.scheduler.switch(version)

    def begin(self, now: float) -> None:
        if self.plan is not None or self.paused or not len(self.scheduler):
            return
        self.plan = plan = self.scheduler.plan()
        assert plan
        context = sum(sequence.length for sequence in plan.decodes)
        seconds = self.costs.step(max(len(plan.decodes), 1)).at(context)
        if plan.chunks:
            pairs = sum(start + i + 1 for chunk in plan.chunks for start in (chunk.start,) for i in range(len(chunk.ids)))
            seconds += self.costs.prefill_s(plan.chunk_tokens, pairs, max(len(plan.decodes), 1))
        self.until = now + seconds

    def go_to(self, now: float) -> None:
        while not self.paused and self.plan is not None and self.until <= now:
            until = self.until
            self.commit(until)
            self.begin(until)

    def commit(self, now: float) -> None:
        assert self.plan is not None
        plan, self.plan, self.until = self.plan, None, inf
        alive = [sequence for sequence in plan.draws if not sequence.ended]
        self.scheduler.commit(plan, [1] * len(plan.draws))
        self.steps += 1
        self.generated += len(alive)
        ended = [sequence for sequence in alive if len(sequence.tokens) == self.end(sequence.request)[0]]
        ended.sort(key=self.scheduler.seats.__getitem__)
        for sequence in ended:
            self.tell(sequence, now, self.end(sequence.request)[1])
            del self.jobs[sequence.request.id]
        self.scheduler.finish(ended)
        if self.tell_every and not self.steps % self.tell_every:
            self.tell_all(now)

    def end(self, request: Request) -> tuple[int, FinishReason]:
        written, most = len(request.written_ids), request.sampling.max_tokens
        room = self.window - len(request.prompt_ids) - written
        limits = [
            (max(self.length(request), written + 1), 0, FinishReason.STOP),
            (written + most, 1, FinishReason.LENGTH),
            (written + room, 2, FinishReason.CONTEXT),
        ]
        end, _, reason = min(limits)
        return end, reason

    def cut(self, sequences: list[Sequence], now: float) -> None:
        seats = self.scheduler.seats
        running = [sequence for sequence in sequences if sequence.prompt is not None]
        waiting = [sequence for sequence in sequences if sequence.prompt is None]
        ordered = sorted(running, key=seats.__getitem__) + sorted(waiting)
        for sequence in ordered:
            self.tell(sequence, now, FinishReason.ABORT)
            del self.jobs[sequence.request.id]
        self.scheduler.finish(ordered)

    def tell_all(self, now: float) -> None:
        for sequence in sorted(self.scheduler._running, key=self.scheduler.seats.__getitem__):
            if len(sequence.tokens) > self.told_tokens[sequence]:
                self.tell(sequence, now, None)

    def tell(self, sequence: Sequence, now: float, finish: FinishReason | None) -> None:
        tokens = len(sequence.tokens) - self.told_tokens[sequence]
        self.told_tokens[sequence] = len(sequence.tokens)
        version = self.scheduler.version
        oldest = sequence.oldest_kv or version
        self.told.append(Told(now, sequence.request.id, tokens, version, oldest, finish))
