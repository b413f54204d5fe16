"""An engine with continuous batching, from completion to completion (PURE).

What is modelled, step by step as `engine.embedded.scheduler` plans it (vLLM's does much the same):
- A step gives every sequence that decodes one token. It takes what `costs.step` says of their number and of what they attend to,
  and besides `costs.prefill_s` of the chunk that is computed beside them.
- Slots that are free are refilled at the beginning of a step, by priority and arrival. What is handed over while a step is under
  way, or the moment that it begins, comes to the next one. Prompts, and what was written elsewhere or lost its pages, are
  computed in chunks: of `prefill_tokens` while anything decodes, else of `step_tokens`. The last chunk of a prompt gives the
  first token of everybody who waits for it.
- A prompt is computed once for its group, and its pages are kept as long as there is room, at most one prompt a slot once nobody
  uses it, and until the weights change. When pages run out, those go first, then the running sequence that is last by priority
  and arrival, which is computed anew later.
- Who is told to stand still does so at once: the step under way goes on to its end, and gives its tokens once the engine goes on.
  An abort takes effect at once too, and the step under way takes no less time for it.

Not modelled: that chunks are padded where they are computed (the embedded engine on a CPU), CUDA graphs that round the number of
sequences up, prompts that share only their beginning, and static batching.

Between two changes of who runs, steps are not looked at one by one: `StepCost.total` says what many take. Steps are counted as
whole numbers, so that what a request is told never depends on rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from math import inf
from typing import Protocol

from rollyard.errors import ConfigError, RequestRejected
from rollyard.plan.batching import Batching
from rollyard.plan.cache import Cache, Running
from rollyard.plan.step import StepCost
from rollyard.plan.tokens import Told
from rollyard.types import Activity, EngineStats, FinishReason, Request, RequestId, Segment, WeightVersion
from rollyard.watch.paces import Paces

EXACT = 1 + 1e-12  # a step that ends within so much of now has ended

Busy = Callable[[Activity, float, float], None]


class EngineCosts(Protocol):
    """What an engine's steps take."""

    def step(self, running: int) -> StepCost:
        """A step in which so many sequences decode; 1 where none does."""
        ...

    def prefill_s(self, tokens: int, pairs: int, beside: int = 1) -> float:
        """Seconds of computing `tokens` tokens that attend to `pairs` tokens in all, each to itself too.

        Args:
            beside: sequences that the step was asked for.
        """
        ...


class EngineModel:
    """One engine on a virtual clock. `now` never goes back from call to call.

    Args:
        name: its name.
        slots: sequences that run at once.
        costs: what its steps take.
        length: tokens of a request's whole completion, what was written elsewhere included, if nothing cuts it.
        pages: pages of the key-value cache.
        page_tokens: tokens of a page.
        step_tokens: tokens of a step at most, decoded and prefilled.
        prefill_tokens: of them prefilled at most, while anything decodes.
        window: tokens of prompt and completion at most.
        share: a prompt is computed once for all requests of its group.
        tell_every: steps between two moments at which it tells what all running requests have written; 0: only at their ends.
        busy: told what it did, from when to when.

    Raises:
        ConfigError: there are more slots than tokens of a step.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        costs: EngineCosts,
        length: Callable[[Request], int],
        *,
        pages: int,
        page_tokens: int = 16,
        step_tokens: int = 2048,
        prefill_tokens: int = 256,
        window: int = 2**31,
        share: bool = True,
        tell_every: int = 0,
        busy: Busy = lambda activity, began, ended: None,
    ) -> None:
        if slots > step_tokens:
            problem = f"{slots} sequences do not fit into a step of {step_tokens} tokens"
            raise ConfigError(problem, where="engine.step_tokens", remedy="at least engine.slots")
        self.name, self.slots = name, slots
        self.version: WeightVersion | None = None
        self._costs, self._length, self._window, self._busy = costs, length, window, busy
        self._cache = Cache(pages, page_tokens, slots, share)
        self._batching = Batching(self._cache, slots=slots, step_tokens=step_tokens, prefill_tokens=prefill_tokens, share=share)
        self._jobs: dict[RequestId, Running] = {}
        self._arrivals = count()
        self._told: list[Segment] = []
        self._tell_every = self._tell_at = tell_every
        self._paused = False
        self._rested = True  # no step has begun since there was nothing to do
        # The steps under way: how many, since when and until when, what each costs, and the chunk of the only one.
        self._steps, self._began, self._until = 0, 0.0, inf
        self._cost, self._chunk, self._chunk_s = costs.step(1), 0, 0.0
        self._span: tuple[Activity, float, float] | None = None
        self._generated = self._chunks = 0
        self._step_s = self._prefill_s = self._busy_slot_s = 0.0
        self._paces = Paces()

    def __len__(self) -> int:
        """Requests that did not end."""
        return len(self._jobs)

    @property
    def next_s(self) -> float:
        """When it is to be asked next what it has to tell; never (inf) unless something is handed over.

        Ask once everything of a moment was handed over: what comes later comes to a later step.
        """
        if self._told:
            return self._began
        self._begin()
        return inf if self._paused or not self._jobs else self._until

    # ------------------------------------------------------------------------------------- what it is told

    def generate(self, requests: Iterable[Request], now: float) -> None:
        """Queue requests. Raises RequestRejected for one that can never run."""
        self._go_to(now)
        if len(self._batching.running) < self.slots:
            self._stop(now)
        if not self._jobs and not self._steps:
            self._began, self._rested = now, True
        for request in requests:
            job = self._job(request)
            self._jobs[request.id] = job
            self._batching.submit(job)

    def abort(self, requests: Iterable[RequestId], now: float) -> list[Segment]:
        """Cut those of them that it has; with everything else that it had to tell."""
        self._go_to(now)
        self._stop(now)
        jobs = [self._jobs[request] for request in requests if request in self._jobs]
        return self._tell(self._cut(jobs))

    def pause(self, now: float, cut: bool) -> list[Segment]:
        """Stand still: everything is cut, or told as far as it is written."""
        self._go_to(now)
        self._stop(now)
        self._rest()
        self._paused = True
        if cut:
            return self._tell(self._cut(self._jobs.values()))
        return self._tell(self._news())

    def resume(self, now: float) -> None:
        """Go on. A step that was under way gives its tokens at its end, or now if that is over."""
        self._paused = False
        if self._until <= now * EXACT:
            self._commit(self._steps, self._until)
        if not self._steps:
            self._began = now
            self._begin()

    def load(self, version: WeightVersion) -> None:
        """Decode with other weights from now on; it stands still or has nothing to do."""
        self.version = version
        self._batching.switch(version)

    def sleep(self) -> None:
        """Give the cache back; it has nothing to do."""
        self._cache.forget()

    def advance(self, now: float) -> list[Segment]:
        """What has ended up to now and was not told yet: in order, those of one step in the order in which they got slots."""
        self._go_to(now)
        told, self._told = self._told, []
        return told

    def settle(self, now: float) -> None:
        """Tell what it did up to now, and count it."""
        self._go_to(now)
        self._catch_up(now)
        self._rest()

    def stats(self) -> EngineStats:
        """Up to the last call with a time."""
        counters = self._batching.counters
        return EngineStats(
            steps=self._batching.done,
            generated_tokens=self._generated,
            prefilled_tokens=counters.prefilled,
            shared_tokens=counters.shared,
            recomputed_tokens=counters.recomputed,
            preemptions=counters.preemptions,
            step_s=self._step_s,
            prefill_s=self._prefill_s,
            prefill_steps=self._chunks,
            busy_slot_s=self._busy_slot_s,
            slots=self.slots,
            paces=self._paces.totals(),
        )

    # -------------------------------------------------------------------------------------------- the clock

    def _go_to(self, now: float) -> None:
        """Whatever is under way and ends by now has ended."""
        if self._paused:
            return
        limit = now * EXACT
        if not self._steps and self._began < now:
            self._begin()
        while self._until <= limit:
            self._commit(self._steps, self._until)
            if self._began < now:
                self._begin()

    def _catch_up(self, now: float) -> None:
        """So have those of several steps that ended by now."""
        if self._steps > 1 and not self._paused:
            context, decodes = self._batching.context(), self._cache.members
            ended = self._cost.fit(context, decodes, now * EXACT - self._began, self._steps - 1)
            if ended:
                self._commit(ended, self._began + self._cost.total(context, decodes, ended))

    def _stop(self, now: float) -> None:
        """What comes after the step that is under way now is open."""
        if not self._steps and not self._rested:
            self._begin(one=True)
        self._catch_up(now)
        if self._steps > 1:
            self._steps = 1
            self._batching.one()
            self._until = self._began + self._cost.at(self._batching.context())

    def _begin(self, *, one: bool = False) -> None:
        """Plan the next steps, or only one, if none is under way and there is something to do."""
        if self._steps or self._paused or not self._jobs:
            return
        self._steps, decodes, context, tokens, pairs = self._batching.plan(one)
        if self._tell_every:
            self._steps = min(self._steps, self._tell_at - self._batching.done)
        self._rested = False
        beside = max(decodes, 1)
        self._cost = self._costs.step(beside)
        self._chunk, self._chunk_s = tokens, self._costs.prefill_s(tokens, pairs, beside) if tokens else 0.0
        if self._steps > 1:
            self._until = self._began + self._cost.total(context, decodes, self._steps)
        else:
            self._until = self._began + self._cost.at(context) + self._chunk_s

    def _commit(self, steps: int, until: float) -> None:
        """So many of the steps under way have ended."""
        batching = self._batching
        if batching.running:
            self._count(steps, until)
        batching.commit(steps)
        self._began, self._steps = until, self._steps - steps
        if not self._steps:
            self._until = inf
            self._told += [self._end(job, job.finish) for job in batching.ended()]
            if self._tell_every and batching.done >= self._tell_at:
                self._tell_at += self._tell_every
                self._told += self._news()
        if not batching.running:
            self._rest()

    def _count(self, steps: int, until: float) -> None:
        batching, began, span = self._batching, self._began, self._span
        elapsed = until - began
        decodes, draws = self._cache.members, len(batching.drawing)
        self._generated += decodes * steps + draws
        self._step_s += elapsed
        self._busy_slot_s += (decodes + draws) * elapsed
        if self._chunk_s > 0:
            self._prefill_s += self._chunk_s
            self._chunks += 1
        activity = Activity.EVAL
        if batching.rollouts:
            activity = Activity.GENERATE
            context = steps * batching.context() + decodes * steps * (steps - 1) // 2
            self._paces.add(decodes, self._chunk, context, elapsed, steps=steps)
        if span is not None and span[0] is activity and span[2] == began:
            began = span[1]
        else:
            self._rest()
        self._span = (activity, began, until)

    def _rest(self) -> None:
        if self._span is not None:
            self._busy(*self._span)
            self._span = None

    # ----------------------------------------------------------------------------------------- its requests

    def _job(self, request: Request) -> Running:
        prompt, written, most = len(request.prompt_ids), len(request.written_ids), request.sampling.max_tokens
        room = self._window - prompt - written
        if room < 1 or most < 1:
            raise RequestRejected(f"request {tuple(request.id)} can never run: no room for a token")
        end, finish = max(self._length(request), written + 1), FinishReason.STOP
        if end > written + min(most, room):
            end, finish = written + min(most, room), FinishReason.LENGTH if most <= room else FinishReason.CONTEXT
        need = self._cache.pages_for(min(prompt + written + most, self._window) - 1)  # the last token needs none
        if need > self._cache.pages:
            raise RequestRejected(f"request {tuple(request.id)} can never run: it may need {need} pages of {self._cache.pages}")
        return Running(request, (request.priority, next(self._arrivals)), prompt, written, end, finish, written)

    def _end(self, job: Running, finish: FinishReason) -> Segment:
        segment = self._segment(job, finish)
        self._batching.finish(job)
        del self._jobs[job.request.id]
        return segment

    def _cut(self, jobs: Iterable[Running]) -> list[Segment]:
        ordered = sorted(jobs, key=lambda job: (job.seat < 0, job.seat, job.rank))
        return [self._end(job, FinishReason.ABORT) for job in ordered]

    def _segment(self, job: Running, finish: FinishReason | None) -> Segment:
        written = self._batching.written(job)
        tokens, job.told = Told(written - job.told), written
        version = self.version
        assert version is not None, "requests are taken only after a load"
        return Segment(job.request.id, tokens, tokens, version, job.oldest_kv or version, finish)

    def _news(self) -> list[Segment]:
        """What running requests wrote since they were told of last, in the order in which they got slots."""
        running = sorted((job for _, _, job in self._batching.running), key=_seat)
        return [self._segment(job, None) for job in running if self._batching.written(job) > job.told]

    def _tell(self, segments: Sequence[Segment]) -> list[Segment]:
        told, self._told = [*self._told, *segments], []
        return told


def _seat(job: Running) -> int:
    return job.seat
