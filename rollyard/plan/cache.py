"""The pages of a modelled engine's cache: counted, not numbered (PURE). Who takes one when follows `engine.embedded.scheduler`.

A sequence that decodes takes a page every `page_tokens` steps, so that what many steps take has a closed form. A prompt's pages
are held by the prompt while it is kept, and by every sequence that started from it; its last one, where it is not full, by those
that wrote nothing yet: who writes first takes a page of its own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from rollyard.types import FinishReason, Request, WeightVersion

Rank = tuple[int, int]  # priority, arrival


@dataclass(slots=True, eq=False)
class Shared:
    """A prompt's keys and values."""

    key: Hashable
    tokens: int
    again: bool  # computed before, for the same request
    computed: int = 0  # tokens
    users: int = 0  # running sequences
    forks: int = 0  # of them, those that hold its pages
    unwritten: int = 0  # of those, the ones that have no page of their own where its last one is not full
    kept: bool = True
    shared: bool = False  # a sequence took the pages already
    step: int = -1  # the last one that computed a part of it

    @property
    def ready(self) -> bool:
        return self.computed == self.tokens


@dataclass(slots=True, eq=False)
class Running:
    """One request while the engine has it."""

    request: Request
    rank: Rank
    prompt_tokens: int
    tokens: int  # of the completion, where it does not decode
    end: int  # tokens of the completion, in the end
    finish: FinishReason
    told: int  # tokens
    seat: int = -1  # the how-manieth to run; -1: it waits, or is gone
    start: int = 0  # while it decodes: the engine's steps so far less the tokens of the completion
    decodes: bool = False
    started: bool = False  # it holds its prompt's pages
    unwritten: bool = False  # and nothing else, where the last one of them is not full
    uncomputed: int = 0  # of `tokens`, once started and where it does not decode
    preempted: bool = False
    prompt: Shared | None = None
    oldest_kv: WeightVersion | None = None


@dataclass(slots=True, eq=False)
class Cache:
    """All pages of one engine.

    Args:
        pages: how many there are.
        page_tokens: tokens of a page.
        kept: prompts that are kept at most though no running sequence uses them.
        share: a prompt is computed once for all requests that have it.
    """

    pages: int
    page_tokens: int
    kept: int
    share: bool
    at: int = 0  # decode steps whose pages were taken
    free: int = 0
    members: int = 0  # sequences that decode
    takers: list[dict[Running, None]] = field(default_factory=list)  # [page_tokens]: who takes a page at such steps
    counts: list[int] = field(default_factory=list)  # [2 * page_tokens]: how many these are, twice over
    unwritten: dict[Running, None] = field(default_factory=dict)  # sequences that decode and did not write yet
    prompts: dict[Hashable, Shared] = field(default_factory=dict)
    idle: dict[Hashable, Shared] = field(default_factory=dict)  # those no running sequence uses, the longest unused first
    idle_pages: int = 0

    def __post_init__(self) -> None:
        self.free = self.pages
        self.takers = [{} for _ in range(self.page_tokens)]
        self.counts = [0] * (2 * self.page_tokens)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    # ------------------------------------------------------------------------------- sequences that decode

    def join(self, running: Running) -> None:
        """It decodes from the next step on."""
        self.members += 1
        place = (running.start + 1 - running.prompt_tokens) % self.page_tokens
        self.takers[place][running] = None
        self.counts[place] += 1
        self.counts[place + self.page_tokens] += 1
        if running.unwritten:
            self.unwritten[running] = None

    def leave(self, running: Running) -> None:
        """It decodes no longer."""
        self.members -= 1
        place = (running.start + 1 - running.prompt_tokens) % self.page_tokens
        del self.takers[place][running]
        self.counts[place] -= 1
        self.counts[place + self.page_tokens] -= 1
        self.unwritten.pop(running, None)

    def fit(self, steps: int) -> int:
        """How many of so many steps of those that decode find their pages without a preemption; it may say too few."""
        room = self.free + self.idle_pages - len(self.unwritten)
        if self.members * (steps // self.page_tokens + 1) <= room:
            return steps
        if room < 0:
            return 0
        rounds = min(room // self.members, steps // self.page_tokens)
        room -= rounds * self.members
        done = rounds * self.page_tokens
        while done < steps:
            room -= self.counts[(self.at + done) % self.page_tokens]
            if room < 0:
                break
            done += 1
        return done

    def write_to(self, step: int) -> None:
        """All that decode write their tokens up to that step, and take their pages; there are enough of them."""
        steps = step - self.at
        if not steps:
            return
        if self.unwritten:
            for running in self.unwritten:
                self.write_first(running)
            self.unwritten.clear()
        rounds, rest = divmod(steps, self.page_tokens)
        pages = rounds * self.members
        if rest:
            place = self.at % self.page_tokens
            pages += sum(self.counts[place : place + rest])
        self.at = step
        if pages > self.free:
            self.find(pages)
        self.free -= pages

    def due(self) -> list[Running]:
        """Who of those that decode takes a page at the next step, by rank."""
        return sorted({**self.takers[self.at % self.page_tokens], **self.unwritten}, key=lambda running: running.rank)

    def missing(self, running: Running) -> int:
        """Pages that its next token takes, one at most."""
        return int(running in self.takers[self.at % self.page_tokens] or self.copies(running))

    # -------------------------------------------------------------------------------------------- pages

    def find(self, pages: int) -> bool:
        """Are so many pages free, if prompts that nobody uses are dropped?"""
        while self.free < pages and self.idle:
            self.drop(next(iter(self.idle.values())))
        return self.free >= pages

    def take(self, pages: int) -> None:
        found = self.find(pages)
        assert found, "more pages were taken than there are"
        self.free -= pages

    def copies(self, running: Running) -> bool:
        """Does it need a page of its own before it writes anything?"""
        prompt = running.prompt
        assert prompt is not None
        return running.unwritten and (prompt.kept or prompt.unwritten > 1)

    def write_first(self, running: Running) -> None:
        """Its prompt's last page is copied, or becomes its own."""
        if self.copies(running):
            self.take(1)
        if running.unwritten:
            assert running.prompt is not None
            running.prompt.unwritten -= 1
            running.unwritten = False

    def release(self, running: Running, computed: int) -> None:
        """A running sequence gives up all that it holds; it has keys and values of so many tokens, or did not start."""
        prompt, running.prompt = running.prompt, None
        assert prompt is not None
        if running.started:
            running.started = False
            prompt.forks -= 1
            if computed > prompt.tokens:
                self.free += self.pages_for(computed) - prompt.tokens // self.page_tokens
            if running.unwritten:
                running.unwritten = False
                prompt.unwritten -= 1
                self.free += not prompt.kept and not prompt.unwritten
            if not prompt.kept and not prompt.forks:
                self.free += prompt.tokens // self.page_tokens
        prompt.users -= 1
        if not prompt.users and prompt.kept:
            self._rest(prompt)

    # ------------------------------------------------------------------------------------------- prompts

    def use(self, key: Hashable, tokens: int, beside: int, again: bool) -> Shared | None:
        """The prompt for one more sequence; None where there are no pages for it and `beside` more."""
        prompt = self.prompts.get(key)
        if prompt is not None and self.idle.pop(key, None) is not None:  # not to be dropped for its own user
            self.idle_pages -= self.pages_for(tokens)
        if not self.find(beside + (0 if prompt is not None else self.pages_for(tokens))):
            if prompt is not None and not prompt.users:
                self._idle(prompt)
            return None
        if prompt is None:
            prompt = self.prompts[key] = Shared(key, tokens, again)
            self.free -= self.pages_for(tokens)
        prompt.users += 1
        return prompt

    def fork(self, running: Running) -> bool:
        """The sequence shares its prompt's pages from here on. Had another done so before?"""
        prompt = running.prompt
        assert prompt is not None
        prompt.forks += 1
        running.started = True
        if prompt.tokens % self.page_tokens:
            running.unwritten = True
            prompt.unwritten += 1
        before, prompt.shared = prompt.shared, True
        return before

    def drop(self, prompt: Shared) -> None:
        """It is kept no longer. Sequences that hold its pages go on."""
        del self.prompts[prompt.key]
        if self.idle.pop(prompt.key, None) is not None:
            self.idle_pages -= self.pages_for(prompt.tokens)
        prompt.kept = False
        if not prompt.forks:
            self.free += prompt.tokens // self.page_tokens
        if prompt.tokens % self.page_tokens:
            self.free += not prompt.unwritten

    def switch(self) -> None:
        """The weights changed: nothing computed before is shared any more."""
        for prompt in list(self.prompts.values()):
            if prompt.ready:
                self.drop(prompt)
            else:
                prompt.computed, prompt.again = 0, True

    def forget(self) -> None:
        """Drop all prompts that nobody uses."""
        for prompt in list(self.idle.values()):
            self.drop(prompt)

    def _rest(self, prompt: Shared) -> None:
        self._idle(prompt)
        if not prompt.ready or not self.share:
            self.drop(prompt)
        elif len(self.idle) > self.kept:
            self.drop(next(iter(self.idle.values())))

    def _idle(self, prompt: Shared) -> None:
        self.idle[prompt.key] = prompt
        self.idle_pages += self.pages_for(prompt.tokens)
