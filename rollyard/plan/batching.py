"""Who runs in a modelled engine, and what its next steps compute (PURE): as `engine.embedded.scheduler`, many steps at once.

Those that decode all get a token at each step, so that who ends first is known by the step at which it does. Steps differ only
where somebody comes, ends, or finds no page: `plan` says how many do not.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from rollyard.plan.cache import Cache, Running, Shared
from rollyard.types import WeightVersion

GONE = -2  # the seat of one that has ended

Entry = tuple[int, int, Running]


@dataclass(slots=True)
class Counters:
    """Running totals, in tokens; see `EngineStats`."""

    prefilled: int = 0
    shared: int = 0
    recomputed: int = 0
    preemptions: int = 0


class Batching:
    """Slots, and who waits for them.

    Args:
        cache: its pages.
        slots, step_tokens, prefill_tokens, share: see `EngineModel`.
    """

    def __init__(self, cache: Cache, *, slots: int, step_tokens: int, prefill_tokens: int, share: bool) -> None:
        self.cache, self.slots, self.share = cache, slots, share
        self.step_tokens, self.prefill_tokens = step_tokens, min(prefill_tokens, step_tokens)
        self.counters = Counters()
        self.version: WeightVersion | None = None
        self.done = 0  # steps
        self.rollouts = 0  # of the running requests, those that are not for evaluation or a probe
        self.running: list[Entry] = []  # by rank
        self.drawing: list[Running] = []  # of them, those that do not decode and get a token at the step under way
        self._pending: list[Entry] = []  # of them, those that do not decode, by rank
        self._waiting: list[Entry] = []  # a heap by rank; may hold some that ended
        self._ends: list[Entry] = []  # a heap: the step after which it ends, its seat; may be out of date
        self._seats = count()
        self._offset = 0  # those that decode attend at step n to this and n times their number
        self._changed = True  # since slots were refilled
        self._short = False  # a sequence could not be computed for want of pages

    # ----------------------------------------------------------------------------------------- from outside

    def submit(self, job: Running) -> None:
        """Queue it."""
        heappush(self._waiting, (*job.rank, job))
        self._changed = True

    def finish(self, job: Running) -> None:
        """It ends, running or waiting."""
        if job.seat >= 0:
            self._leave(job)
        job.seat = GONE
        self._changed = True

    def switch(self, version: WeightVersion) -> None:
        """The weights changed: nothing computed before is shared any more. Running sequences keep what they have."""
        self.version, self._changed = version, True
        self.cache.switch()

    def written(self, job: Running) -> int:
        """Tokens of its completion so far."""
        return self.done - job.start if job.decodes else job.tokens

    def context(self) -> int:
        """Tokens that those that decode attend to at the next step."""
        return self._offset + self.cache.members * self.done

    def plan(self, one: bool) -> tuple[int, int, int, int, int]:
        """What to compute next, in one step or until something changes. Somebody runs or waits.

        Returns:
            How many steps; how many sequences decode in them; tokens that these attend to at the first step, and at each later
            one as many more as there are of them; tokens that are computed beside them, where it is one step; and what those
            attend to.
        """
        cache = self.cache
        self._find_room()
        members = cache.members  # whoever starts now decodes from the next step on
        tokens, pairs, held_up = 0, 0, False
        if self._changed or self._pending:
            cache.write_to(self.done + 1)
            held_up = self._short
            self._admit()
            tokens, pairs = self._compute(members)
            held_up &= not self._short  # slots may be refilled at the next step, and were not at this one
            self._changed = held_up or bool(self._pending)
        assert self.running, "nobody got a slot"
        steps = 1
        if not one and members and not (tokens or self.drawing or held_up):
            ready = cache.at - self.done
            steps = ready + cache.fit(self._next_end() - self.done - ready)
        return steps, members, self._offset + members * self.done, tokens, pairs

    def one(self) -> None:
        """Of the steps that were planned only the first is under way now."""
        self.cache.write_to(self.done + 1)

    def commit(self, steps: int) -> None:
        """So many steps were carried out, all that were planned or fewer."""
        self.done += steps
        if self.cache.at != self.done:
            self.cache.write_to(self.done)
        if self.drawing:
            for job in self.drawing:
                job.uncomputed = 0
                job.start = self.done - job.tokens - 1
                self._join(job)
            self._pending = [entry for entry in self._pending if not entry[2].decodes]
            self.drawing = []

    def ended(self) -> list[Running]:
        """Those with nothing left to write, in the order in which they got slots. They still are to be finished."""
        ended: list[Running] = []
        ends = self._ends
        while ends and ends[0][0] <= self.done:
            _, seat, job = heappop(ends)
            if job.seat == seat:
                ended.append(job)
        return ended

    # -------------------------------------------------------------------------------------------- one step

    def _next_end(self) -> int:
        """The step after which the first of those that decode ends."""
        ends = self._ends
        while ends[0][1] != ends[0][2].seat:
            heappop(ends)
        return ends[0][0]

    def _find_room(self) -> None:
        """Pages for the next token of those that decode; where there are too few, somebody gives some back."""
        cache = self.cache
        if self._pending and cache.at == self.done:
            self._join_computed()
        if cache.at > self.done or not cache.members or cache.fit(1):
            return
        for job in cache.due():
            if job.decodes:
                self._write(job)
        cache.at += 1

    def _write(self, job: Running) -> None:
        """Its next token finds its page, or it is preempted itself."""
        cache = self.cache
        while not cache.find(cache.missing(job)):
            if self._yield_pages(job) is job:
                return
        if job.unwritten:
            del cache.unwritten[job]
            cache.write_first(job)
        else:
            cache.take(1)

    def _yield_pages(self, job: Running) -> Running | None:
        """Somebody gives pages back for it: the last by rank, or its own prompt when it is alone."""
        last = self.running[-1][2]
        if len(self.running) == 1:
            assert job.prompt is not None and job.prompt.kept, "a request that fits found no page"
            self.cache.drop(job.prompt)
            return None
        self._leave(last)
        last.preempted = self._changed = True
        self.counters.preemptions += 1
        heappush(self._waiting, (*last.rank, last))
        return last

    def _join_computed(self) -> None:
        """Whoever lacks nothing but its newest token decodes."""
        ready = [job for _, _, job in self._pending if job.started and job.uncomputed == 1]
        for job in ready:
            job.start = self.done - job.tokens
            self._join(job)
        if ready:
            self._pending = [entry for entry in self._pending if not entry[2].decodes]

    def _admit(self) -> None:
        # Who is short of pages goes first; it may have been aborted since.
        while self._waiting and len(self.running) < self.slots and not (self._short and self.running):
            entry = self._waiting[0]
            if entry[2].seat != GONE:
                if not self._seat(entry[2]):
                    return
                insort(self.running, entry)
                insort(self._pending, entry)
            heappop(self._waiting)

    def _seat(self, job: Running) -> bool:
        """Give it a slot if there are pages for all its tokens, and for one more beside running sequences."""
        prompt, cache = job.prompt_tokens, self.cache
        beside = cache.pages_for(prompt + job.tokens) - prompt // cache.page_tokens + 1 if self.running else 0
        key = (job.request.id.group, prompt) if self.share else job.rank
        shared = cache.use(key, prompt, beside, job.preempted or job.tokens > 0)
        if shared is None:
            return False
        job.prompt, job.seat = shared, next(self._seats)
        self.rollouts += job.request.id.group >= 0
        if shared.ready:
            self._start(job)
        return True

    def _start(self, job: Running) -> None:
        """It has its prompt: its first token comes of this step, or what it wrote before is computed."""
        if self.cache.fork(job):
            self.counters.shared += job.prompt_tokens
        job.uncomputed, job.oldest_kv = job.tokens, self.version
        if not job.tokens:
            self.drawing.append(job)

    def _compute(self, decodes: int) -> tuple[int, int]:
        """Chunks beside so many that decode: their tokens, and what these attend to."""
        self._short = False
        if not self._pending:
            return 0, 0
        most = min(self.prefill_tokens if decodes else self.step_tokens, self.step_tokens - decodes)
        tokens = pairs = index = 0
        complete = False  # a prompt is, and nobody who waits for it has started
        while index < len(self._pending) and tokens < most:
            job = self._pending[index][2]
            prompt = job.prompt
            assert prompt is not None
            size = begin = 0
            if job.started:
                if job.uncomputed:
                    size, begin = self._recompute(job, most - tokens, decodes + tokens > 0)
            elif prompt.step != self.done and not prompt.ready:
                size, begin = self._prefill(prompt, most - tokens)
                complete |= prompt.ready
            tokens += size
            pairs += size * begin + size * (size + 1) // 2
            index += 1
        if complete:
            for _, _, job in self._pending:
                if not job.started and job.prompt is not None and job.prompt.ready:
                    self._start(job)
        return tokens, pairs

    def _prefill(self, prompt: Shared, most: int) -> tuple[int, int]:
        begin = prompt.computed
        size = min(prompt.tokens - begin, most)
        prompt.computed, prompt.step = begin + size, self.done
        if prompt.again:
            self.counters.recomputed += size
        else:
            self.counters.prefilled += size
        return size, begin

    def _recompute(self, job: Running, most: int, others: bool) -> tuple[int, int]:
        cache = self.cache
        size = min(job.uncomputed, most)
        begin = job.prompt_tokens + job.tokens - job.uncomputed
        pages = cache.pages_for(begin + size) - cache.pages_for(begin)
        while not cache.find(pages + cache.copies(job)):
            # Those before it by rank make room in time, if any has something to do; if not, the last must yield.
            if others or (self.running[-1][2] is job and len(self.running) > 1):
                self._short = True
                return 0, 0
            self._yield_pages(job)
        cache.take(pages)
        cache.write_first(job)
        job.uncomputed -= size
        self.counters.recomputed += size
        if not job.uncomputed:
            self.counters.recomputed -= 1  # the newest token never was computed before
            self.drawing.append(job)
        return size, begin

    # ------------------------------------------------------------------------------------ coming and going

    def _join(self, job: Running) -> None:
        """It decodes from the next step on."""
        job.decodes = True
        self._offset += job.prompt_tokens - job.start
        self.cache.join(job)
        heappush(self._ends, (job.start + job.end, job.seat, job))

    def _leave(self, job: Running) -> None:
        """It loses its slot and its pages, not what it wrote."""
        entry = (*job.rank, job)
        del self.running[bisect_left(self.running, entry)]
        self.rollouts -= job.request.id.group >= 0
        if job.decodes:
            job.tokens = self.done - job.start
            self._offset -= job.prompt_tokens - job.start
            self.cache.leave(job)
            computed = job.prompt_tokens + self.cache.at - job.start - 1
        else:
            computed = job.prompt_tokens + job.tokens - job.uncomputed
            del self._pending[bisect_left(self._pending, entry)]
            if job in self.drawing:
                self.drawing.remove(job)
        self.cache.release(job, computed)
        job.decodes, job.seat, job.uncomputed = False, -1, 0
