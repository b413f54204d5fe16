"""Continuous batching (PURE): which tokens the next engine step computes.

`plan` fills a step with at most `step_tokens` tokens: first one token of every running sequence that decodes, then
chunks of prompts and of sequences being recomputed. Free slots are refilled before the chunks are chosen. While anything
decodes, the chunks of a step have at most `prefill_tokens` tokens, so that a long prompt delays nobody's next token for
long.

A prompt is computed once, by no sequence in particular: its `PromptPages` belong to all requests with the same token
ids. When the last chunk is computed each of them shares the pages and draws its first token from the same hidden state,
and so does who comes later, for as long as the pages are kept: until they are needed, the weights change, or more
prompts than slots are kept that no running sequence uses.

When pages run out, kept prompts go first, then the running sequence that is last by (priority, arrival) gives its pages
back and waits again; what it wrote is computed anew later. The first by rank always finds its pages, so every step
makes progress.

Static batching is there to be compared with. As in padded generation, a sequence that ended keeps its slot and goes on
being computed, its last token again and again, until the longest has ended; nobody gets what is drawn for it.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from rollyard.engine.embedded.pages import PagePool, PageTable
from rollyard.types import Request, WeightVersion

PADDED_SHARE = 4  # chunks are padded to the longest of the step: at most this many times what they may have in all


@dataclass(slots=True, eq=False)
class PromptPages:
    """A prompt's keys and values, computed once for all its completions."""

    ids: tuple[int, ...]  # [tokens]
    key: tuple[int, ...]  # what it is found by: its ids, or where prompts are not shared the rank of its sequence
    table: PageTable
    again: bool  # computed before, for the same request
    users: int = 0  # running sequences
    step: int = -1  # the last one that computed a chunk of it
    shared: bool = False  # a sequence took the pages already
    hidden: object = None  # the runner's: hidden state of the last token

    @property
    def ready(self) -> bool:
        return self.table.tokens == len(self.ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request while the engine has it. Ordered by (priority, arrival)."""

    request: Request
    rank: tuple[int, int]
    tokens: list[int]  # [tokens], written so far, here or elsewhere
    uncomputed: int = 0  # of `tokens`, once started: how many have no keys and values in the cache yet
    table: PageTable = field(default_factory=PageTable)
    prompt: PromptPages | None = None  # while it runs
    oldest_kv: WeightVersion | None = None  # of the cache it attends to
    preempted: bool = False
    ended: bool = False

    def __lt__(self, other: Sequence) -> bool:
        return self.rank < other.rank

    @property
    def started(self) -> bool:
        """It holds its prompt's pages."""
        return self.table.tokens > 0

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.request.prompt_ids) + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one page table, computed in one step."""

    ids: tuple[int, ...] | list[int]  # [tokens]
    start: int  # position of the first
    table: PageTable


@dataclass(slots=True)
class Plan:
    """One engine step. Its flat batch is one token of each of `decodes`, then the tokens of each of `chunks`.

    The next token of `draws[i]` comes from the hidden state of flat token `sources[i]`, or from a prompt's kept one.
    """

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    chunk_tokens: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target) pages, before anything is written
    finished: list[tuple[PromptPages, int]] = field(default_factory=list)  # prompts whose last token is flat token i
    draws: list[Sequence] = field(default_factory=list)
    sources: list[int | PromptPages] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.draws or self.chunks)


@dataclass(slots=True)
class Counters:
    """Running totals, in tokens; see `EngineStats`."""

    prefilled: int = 0
    shared: int = 0
    recomputed: int = 0
    preemptions: int = 0


class Scheduler:
    """Decides what each step computes. Each step costs O(running sequences), however many requests wait.

    Args:
        pool: the pages.
        slots: sequences running at once.
        step_tokens: tokens of a step at most.
        prefill_tokens: of them prompt tokens and tokens to recompute, where something decodes.
        window: tokens of prompt and completion at most.
        continuous: refill a slot when its sequence ends; else only when all running sequences have ended, and until then
            the ended ones are computed with the others, where pages allow.
        share: compute a prompt once for all its completions.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        slots: int,
        step_tokens: int,
        prefill_tokens: int,
        window: int,
        continuous: bool = True,
        share: bool = True,
    ) -> None:
        self.pool, self.slots, self.window = pool, slots, window
        self.step_tokens, self.prefill_tokens = step_tokens, min(prefill_tokens, step_tokens)
        self.continuous, self.share = continuous, share
        self.counters = Counters()
        self.version = WeightVersion(0)
        self._waiting: list[Sequence] = []  # a heap; may hold some that ended
        self._running: list[Sequence] = []  # by rank
        self._padding: list[Sequence] = []  # static batching: ended, but computed until all have ended
        self._unfinished = 0
        self._prompts: dict[tuple[int, ...], PromptPages] = {}
        self._idle: dict[tuple[int, ...], PromptPages] = {}  # those no running sequence uses, the longest unused first
        self._arrivals = count()
        self._steps = 0
        self._short_of_pages = False  # a running sequence could not be computed for want of pages

    def __len__(self) -> int:
        """Requests that did not end."""
        return self._unfinished

    def lacks(self, request: Request) -> str:
        """Why the cache can never hold it; empty when it can."""
        known = len(request.prompt_ids) + len(request.written_ids)
        pages = self.pool.pages_for(min(known + request.sampling.max_tokens, self.window) - 1)  # the last token needs none
        if pages <= self.pool.size:
            return ""
        return f"it may need {pages} pages of {self.pool.page_tokens} tokens and the cache has {self.pool.size}"

    def submit(self, request: Request) -> Sequence:
        """Queue a request that can run."""
        sequence = Sequence(request, (request.priority, next(self._arrivals)), list(request.written_ids))
        self._unfinished += 1
        heapq.heappush(self._waiting, sequence)
        return sequence

    def finish(self, sequences: Iterable[Sequence]) -> None:
        """These end, running or waiting. Their pages are given back; in static batching with the last of them."""
        ended = [sequence for sequence in sequences if not sequence.ended]
        for sequence in ended:
            sequence.ended = True
            if sequence.prompt is None:
                continue
            self._leave_prompt(sequence)
            if self.continuous or not sequence.started or sequence.uncomputed != 1:
                self.pool.free(sequence.table)
            else:
                self._padding.append(sequence)
        if ended:
            self._unfinished -= len(ended)
            self._running = [sequence for sequence in self._running if not sequence.ended]
        if not self._running:
            self._drop_padding()

    def commit(self, plan: Plan, tokens: list[int]) -> None:
        """The plan was carried out and gave each of its draws a token. What ended before takes none."""
        for sequence, token in zip(plan.draws, tokens, strict=True):
            if not sequence.ended:
                sequence.tokens.append(token)
                sequence.uncomputed += 1

    def switch(self, version: WeightVersion) -> None:
        """The weights changed: nothing computed before is shared any more. Running sequences keep what they have."""
        self.version = version
        for prompt in list(self._prompts.values()):
            if prompt.ready:
                self._drop(prompt)
            else:
                prompt.table.tokens, prompt.again = 0, True

    def forget(self) -> None:
        """Drop all kept prompts."""
        for prompt in list(self._idle.values()):
            self._drop(prompt)

    def plan(self) -> Plan:
        """What to compute next; empty when no request is left."""
        self._steps += 1
        plan = Plan()
        self._plan_decodes(plan)
        self._admit()
        self._plan_chunks(plan)
        self._plan_first_draws(plan)
        self._plan_padding(plan)
        return plan

    def _plan_decodes(self, plan: Plan) -> None:
        index = 0
        while index < len(self._running) and len(plan.decodes) < self.step_tokens:
            sequence = self._running[index]
            # Only sequences that come later by rank are preempted, so none that is planned already; or this one itself.
            if sequence.started and sequence.uncomputed == 1 and self._extend_by_one(sequence, plan):
                self._compute(sequence, 1)
                plan.sources.append(len(plan.decodes))
                plan.decodes.append(sequence)
                plan.draws.append(sequence)
            index += 1

    def _admit(self) -> None:
        if self._running and not self.continuous:
            return
        # Who is short of pages goes first; it may have been aborted since.
        while self._waiting and len(self._running) < self.slots and not (self._short_of_pages and self._running):
            sequence = self._waiting[0]
            if not sequence.ended:
                if not self._seat(sequence):
                    return
                insort(self._running, sequence)
            heapq.heappop(self._waiting)

    def _seat(self, sequence: Sequence) -> bool:
        """Join the request's prompt if there are pages for all its tokens, and for one more beside running sequences."""
        ids = tuple(sequence.request.prompt_ids)
        key = ids if self.share else sequence.rank
        prompt = self._prompts.get(key)
        if prompt is None:
            need = self.pool.pages_for(len(ids))
        else:
            self._idle.pop(key, None)  # not to be evicted for its own user
            need = 0
        # Alone, it can write into the prompt's own pages where it must, so it needs no more than the prompt.
        beside = self.pool.pages_for(sequence.length) - len(ids) // self.pool.page_tokens + 1 if self._running else 0
        if not self._find(need + beside):
            if prompt is not None and not prompt.users:
                self._idle[key] = prompt
            return False
        if prompt is None:
            prompt = PromptPages(ids, key, PageTable(), again=sequence.preempted or bool(sequence.tokens))
            self.pool.extend(prompt.table, len(ids))
            self._prompts[key] = prompt
        prompt.users += 1
        sequence.prompt = prompt
        if prompt.ready:
            self._start(sequence, prompt)
        return True

    def _plan_chunks(self, plan: Plan) -> None:
        self._short_of_pages = False
        most = self.prefill_tokens if plan.decodes else self.step_tokens
        for sequence in self._to_compute():
            prompt = sequence.prompt
            assert prompt is not None
            pending = sequence.uncomputed if sequence.started else len(prompt.ids) - prompt.table.tokens
            size = self._chunk_size(plan, pending, most)
            if not size:
                return
            if sequence.started:
                self._plan_recompute(plan, sequence, size)
            else:
                self._plan_prompt(plan, prompt, size)

    def _to_compute(self) -> Iterator[Sequence]:
        """By rank: running sequences to recompute, and one for each prompt to compute. The last may be preempted meanwhile."""
        index = 0
        while index < len(self._running):
            sequence = self._running[index]
            if sequence.started:
                if sequence.uncomputed:  # a decode of this step has none left
                    yield sequence
            elif sequence.prompt is not None and sequence.prompt.step != self._steps:
                yield sequence
            index += 1

    def _chunk_size(self, plan: Plan, pending: int, most: int) -> int:
        """How many of `pending` tokens fit into a step whose chunks have `most` tokens, 0 when none should."""
        padded = PADDED_SHARE * most // (len(plan.chunks) + 1)
        longest = max((len(chunk.ids) for chunk in plan.chunks), default=0)
        left = min(most, self.step_tokens - len(plan.decodes)) - plan.chunk_tokens
        return min(pending, left, padded) if padded >= longest else 0

    def _plan_prompt(self, plan: Plan, prompt: PromptPages, size: int) -> None:
        start = prompt.table.tokens
        self._add_chunk(plan, Chunk(prompt.ids[start : start + size], start, prompt.table))
        prompt.table.tokens += size
        prompt.step = self._steps
        if prompt.again:
            self.counters.recomputed += size
        else:
            self.counters.prefilled += size
        if prompt.ready:
            plan.finished.append((prompt, len(plan.decodes) + plan.chunk_tokens - 1))

    def _plan_recompute(self, plan: Plan, sequence: Sequence, size: int) -> None:
        while not self._find(self.pool.missing(sequence.table, size)):
            # Those before it by rank make room in time, if any has something to do; if not, the last must yield.
            if plan.decodes or plan.chunks or (self._running[-1] is sequence and len(self._running) > 1):
                self._short_of_pages = True
                return
            self._yield_pages(sequence)
        plan.copies += self.pool.extend(sequence.table, size)
        start = len(sequence.tokens) - sequence.uncomputed
        self._add_chunk(plan, Chunk(sequence.tokens[start : start + size], sequence.table.tokens, sequence.table))
        self._compute(sequence, size)
        self.counters.recomputed += size
        if not sequence.uncomputed:
            self.counters.recomputed -= 1  # the newest token never was computed before
            plan.sources.append(len(plan.decodes) + plan.chunk_tokens - 1)
            plan.draws.append(sequence)

    def _plan_first_draws(self, plan: Plan) -> None:
        """Sequences whose prompt is computed, in this step or before, and that wrote nothing yet."""
        at = dict(plan.finished)
        for sequence in self._running:
            if sequence.tokens and sequence.started:
                continue
            prompt = sequence.prompt
            assert prompt is not None
            if not sequence.started and prompt.ready:
                self._start(sequence, prompt)
            if sequence.started and not sequence.tokens:
                plan.sources.append(at.get(prompt, prompt))
                plan.draws.append(sequence)

    def _plan_padding(self, plan: Plan) -> None:
        """The last token of sequences that ended, at its own place. Planned last: until then others may take their pages."""
        for sequence in list(self._padding):
            if not self._chunk_size(plan, 1, self.step_tokens):  # no prompts, so not bound as those are
                return
            if sequence.uncomputed:  # its first step as padding: the token has no place yet
                if self.pool.available < self.pool.missing(sequence.table, 1):
                    continue
                plan.copies += self.pool.extend(sequence.table, 1)
                self._compute(sequence, 1)
            self._add_chunk(plan, Chunk(sequence.tokens[-1:], sequence.table.tokens - 1, sequence.table))
            plan.sources.append(len(plan.decodes) + plan.chunk_tokens - 1)
            plan.draws.append(sequence)

    def _start(self, sequence: Sequence, prompt: PromptPages) -> None:
        """The sequence shares its prompt's pages from here on."""
        sequence.table = self.pool.fork(prompt.table)
        sequence.uncomputed = len(sequence.tokens)
        sequence.oldest_kv = self.version
        if prompt.shared:
            self.counters.shared += len(prompt.ids)
        prompt.shared = True

    @staticmethod
    def _compute(sequence: Sequence, tokens: int) -> None:
        sequence.table.tokens += tokens
        sequence.uncomputed -= tokens

    @staticmethod
    def _add_chunk(plan: Plan, chunk: Chunk) -> None:
        plan.chunks.append(chunk)
        plan.chunk_tokens += len(chunk.ids)

    def _find(self, pages: int) -> bool:
        """Are so many pages available, if padding and kept prompts that nobody uses are dropped?"""
        if self.pool.available < pages:
            self._drop_padding()
        while self.pool.available < pages and self._idle:
            self._drop(next(iter(self._idle.values())))
        return self.pool.available >= pages

    def _drop_padding(self) -> None:
        for sequence in self._padding:
            self.pool.free(sequence.table)
        self._padding.clear()

    def _extend_by_one(self, sequence: Sequence, plan: Plan) -> bool:
        """Room for one token of the sequence; False when it was itself preempted."""
        missing = self.pool.missing(sequence.table, 1)
        if not missing:
            return True
        while not self._find(missing):
            if self._running[-1] is sequence and len(self._running) > 1:
                self._preempt(sequence)
                return False
            self._yield_pages(sequence)
            missing = self.pool.missing(sequence.table, 1)  # fewer, when nobody shares its page any more
        plan.copies += self.pool.extend(sequence.table, 1)
        return True

    def _yield_pages(self, sequence: Sequence) -> None:
        """Somebody gives pages back for `sequence`: the last by rank, or its own prompt when it is alone."""
        if len(self._running) > 1:
            self._preempt(self._running[-1])
        else:
            prompt = sequence.prompt
            assert prompt is not None and self._prompts.get(prompt.key) is prompt, "a request that fits found no page"
            self._drop(prompt)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._leave(sequence)
        sequence.preempted = True
        self.counters.preemptions += 1
        heapq.heappush(self._waiting, sequence)

    def _leave(self, sequence: Sequence) -> None:
        """A running sequence gives up its pages."""
        self._leave_prompt(sequence)
        self.pool.free(sequence.table)

    def _leave_prompt(self, sequence: Sequence) -> None:
        """The prompt is kept if it is ready and not outdated."""
        prompt, sequence.prompt = sequence.prompt, None
        assert prompt is not None
        prompt.users -= 1
        if not prompt.users and self._prompts.get(prompt.key) is prompt:
            self._idle[prompt.key] = prompt
            if not prompt.ready or not self.share:
                self._drop(prompt)
            elif len(self._idle) > self.slots:
                self._drop(next(iter(self._idle.values())))

    def _drop(self, prompt: PromptPages) -> None:
        del self._prompts[prompt.key]
        self._idle.pop(prompt.key, None)
        self.pool.free(prompt.table)
        prompt.hidden = None
