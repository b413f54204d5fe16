"""Where one episode is played: the environment's coroutine, what it asks of whom, and the time that it may take.

A failure of an environment, its time limit included, is a missing verdict of its member: never an exception, never 0.
"""

from __future__ import annotations

import asyncio
import operator
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rollyard.protocols.rollouts import Environment, Hearing
from rollyard.texts import clean
from rollyard.types import Asking, Prompt, Reply, Reward
from rollyard.verdict import cause_of, reward_of

NAME = "environment"  # of its verdict, among those of rewards

Working = Callable[[], AbstractContextManager[None]]
Message = Mapping[str, Any]


class Answer(Protocol):
    """Gives what the policy writes."""

    async def __call__(self, asking: Asking, hearing: Hearing | None = None) -> Reply:
        """`hearing` is there where `asking.streams`."""
        ...


class Tokens(Protocol):
    """What an environment needs of a tokenizer."""

    @property
    def special(self) -> Collection[str]:
        """Tokens that have no text."""
        ...

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def chat(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> tuple[int, ...]: ...

    def chat_after(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Played:
    """How an episode ended. `verdict` None: the configured rewards judge. `text`: of all that came after the prompt."""

    verdict: Reward | None
    text: str


class Player(Protocol):
    """Plays episodes of one environment."""

    @property
    def turns(self) -> int:
        """Answers in one episode at most."""
        ...

    async def play(self, prompt: Prompt, answer: Answer, working: Working = nullcontext) -> Played:
        """One episode.

        Args:
            answer: gives what the policy writes. What it raises is raised.
            working: entered while the environment is at work.
        """
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """Plays episodes of one environment in this process (`Player`).

    Args:
        environment: of the run.
        tokens: the policy's tokenizer.
        vocabulary: ids are below it.
        max_tokens: of one answer at most.
        turns: answers at most; one more is told to have no tokens, and after that it is a mistake to ask.
        limit_s: seconds that the environment may work before it asks again, or ends. Waiting for an answer does not count.
    """

    environment: Environment
    tokens: Tokens
    vocabulary: int
    max_tokens: int
    turns: int
    limit_s: float

    async def play(self, prompt: Prompt, answer: Answer, working: Working = nullcontext) -> Played:
        asker = Asker(self, prompt, answer)
        episode = asyncio.ensure_future(self._episode(asker, prompt))
        episode.add_done_callback(lambda done: done.cancelled() or done.exception())  # what nobody waits for is no news
        try:
            while True:
                with working():
                    asked = await asker.next(episode, self.limit_s)
                if asked is None:
                    break
                await asker.serve(asked, episode)
            if not episode.done():
                problem = f"the environment neither asked nor ended within {self.limit_s:g} s"
                return Played(Reward(None, problem=problem), asker.text)
            return Played(verdict_of(episode), asker.text)
        finally:
            episode.cancel()

    async def _episode(self, asker: Asker, prompt: Prompt) -> Any:
        try:
            return await self.environment.episode(asker, prompt)
        except (SystemExit, KeyboardInterrupt) as error:  # else it would end the run
            raise RuntimeError(cause_of(error)) from error


class Asker:
    """Implements `protocols.Ask` for one episode, and keeps what was said."""

    def __init__(self, stage: Stage, prompt: Prompt, answer: Answer) -> None:
        self._stage, self._prompt, self._answer = stage, prompt, answer
        self._seen, self._said = prompt.token_ids, list[Reply]()
        self._open: _Question | None = None
        self._came = asyncio.Event()
        tokens = stage.tokens
        self.decode, self.chat, self.chat_after = tokens.decode, tokens.chat, tokens.chat_after

    async def __call__(
        self,
        token_ids: Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        hearing: Hearing | None = None,
    ) -> Reply:
        if self._open is not None:
            raise RuntimeError("the answer before is still being written: one at a time")
        if len(self._said) > self._stage.turns:
            raise RuntimeError(f"{self._stage.turns} turns are over, as the reply before has said: it finished with length")
        self._open = _Question(replace(self._asking(token_ids, max_tokens, stop), streams=hearing is not None), hearing)
        self._came.set()
        return await self._open.reply

    def encode(self, text: str) -> tuple[int, ...]:
        return self._stage.tokens.encode(text, special=False)

    def _asking(self, token_ids: Sequence[int], max_tokens: int | None, stop: Sequence[str]) -> Asking:
        ids, most = tuple(map(operator.index, token_ids)), self._stage.max_tokens
        if not ids or min(ids) < 0 or max(ids) >= self._stage.vocabulary:
            raise ValueError(f"{reprlib.repr(ids)} are no ids of a vocabulary of {self._stage.vocabulary}, at least one")
        wanted = most if max_tokens is None else operator.index(max_tokens)
        if not 1 <= wanted <= most:
            raise ValueError(f"{wanted} tokens are asked for, and rollout.max_tokens is {most}")
        return Asking(ids, wanted, self._ends(stop))

    def _ends(self, stop: Sequence[str]) -> tuple[str, ...]:
        """Raises ValueError for what no text can hold, or all do."""
        texts = (stop,) if isinstance(stop, str) else tuple(stop)
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"stop is {stop!r}, not a sequence of texts with something in them")
        if found := [word for word in self._stage.tokens.special if any(word in text for text in texts)]:
            raise ValueError(f"stop is {stop!r}, and no text ever holds the special token {found[0]}")
        if any(clean(text) != text for text in texts):
            raise ValueError(f"stop is {stop!r}, and no text ever holds half a character (a lone surrogate)")
        return texts

    async def next(self, episode: asyncio.Future[Any], limit_s: float) -> Asking | None:
        """Wait until it asks, and give what. None: it ended, or took too long."""
        came = asyncio.ensure_future(self._came.wait())
        try:
            await asyncio.wait((came, episode), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            came.cancel()
        if episode.done() or self._open is None:
            return None
        return self._open.asking

    async def serve(self, asking: Asking, episode: asyncio.Future[Any]) -> None:
        """Have it answered. An environment that ends meanwhile does not wait for that."""
        assert self._open is not None
        answer = asyncio.ensure_future(self._answer(asking, self._open.hearing))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # as with an episode
        try:
            await asyncio.wait((answer, episode), return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                return
            reply, question = answer.result(), self._open
        finally:
            answer.cancel()
        self._seen, self._open = (*asking.prompt_ids, *reply.token_ids), None
        self._said.append(reply)
        self._came.clear()
        if not question.reply.done():  # else nobody waits for it any more
            question.reply.set_result(reply)

    @property
    def text(self) -> str:
        """Of all that came after the prompt; of the answers alone, where the environment rewrote what came before."""
        start = self._prompt.token_ids
        if self._seen[: len(start)] == start:
            return self.decode(self._seen[len(start) :])
        return "\n".join(reply.text for reply in self._said)


@dataclass(frozen=True, slots=True)
class _Question:
    asking: Asking
    hearing: Hearing | None
    reply: asyncio.Future[Reply] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


def verdict_of(episode: asyncio.Future[Any]) -> Reward | None:
    """What an episode that is over says of itself."""
    if episode.cancelled():
        return Reward(None, problem="the environment cancelled its own episode")
    error = episode.exception()
    if error is not None:
        return Reward(None, problem=cause_of(error))
    value = episode.result()
    return None if value is None else reward_of(value, "the environment", NAME)
