"""A language model as judge: it is asked in words, and a number is read from its answer."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from typing import Final

from rollyard.config import JudgeConfig
from rollyard.errors import ConfigError, EngineError, ScoringError, TimeLimitExceeded
from rollyard.reward.cache import Cache
from rollyard.reward.reading import compiled, only_number
from rollyard.reward.workers import InWorkers
from rollyard.types import LARGEST, Completion, Prompt, Reward

TEMPLATE, PARSE = "reward.judge.template", "reward.judge.parse"
BY_NUMBER: Final = "number"
SHOWN: Final = 200  # characters of an answer that a problem shows
KEPT: Final = 2**16  # verdicts, the oldest go first


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model wrote. `cut`: it was not done."""

    text: str
    cut: bool


Ask = Callable[[str], Awaitable[Answer]]


class _NoVerdict(ScoringError):
    """Of one answer."""


class Judge:
    """Asks a language model (protocols.Scorer). The same question is asked once: its verdict is kept, by content.

    Args:
        ask: gives the model's answer, tried as often as it may be. Raises EngineError.
        config: the template, how the answer is read, and the time limit.
        close: of whatever `ask` uses.
        apart: runs `reading.by_expression`, which may never end, in other processes; None where a number is read.
    """

    def __init__(self, ask: Ask, config: JudgeConfig, close: Callable[[], Awaitable[None]], apart: InWorkers | None) -> None:
        self._ask, self._config, self._close, self._apart = ask, config, close, apart
        self._cache = Cache(KEPT)
        self._gate = asyncio.Semaphore(config.concurrency * len(config.url))

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """No verdict where there is no answer in time, or none that can be read: it stands in the problem.

        Raises ScoringError when processes that read answers were lost one after the other.
        """
        question = filled(self._config.template, prompt, completion)
        try:
            return Reward(await self._cache.verdict(question, lambda: self._asked(question)))
        except (_NoVerdict, TimeLimitExceeded, EngineError) as error:
            return Reward(None, problem=str(error))

    async def close(self) -> None:
        await self._cache.close()
        if self._apart is not None:
            await self._apart.close()
        await self._close()

    async def _asked(self, question: str) -> float:
        limit = self._config.limit_s
        try:
            async with self._gate, asyncio.timeout(limit):  # waiting for a place is not its own time
                answer = await self._ask(question)
        except TimeoutError:
            raise TimeLimitExceeded(f"the judge gave no verdict within {limit:g} s") from None
        shown = repr(answer.text if len(answer.text) <= SHOWN else answer.text[:SHOWN] + "...")
        if answer.cut:
            raise _NoVerdict(f"the judge was cut after {self._config.max_tokens} tokens: {shown}")
        number, problem = await self._read(answer.text)
        if number is None or not abs(number * self._config.scale) <= LARGEST:
            why = f" ({problem})" if problem else ""
            raise _NoVerdict(f"the judge's answer cannot be read by {self._config.parse!r}: {shown}{why}")
        return number * self._config.scale

    async def _read(self, text: str) -> tuple[float | None, str]:
        """The number, or why there is none where more than that is to be said."""
        if self._apart is None:
            return only_number(text), ""
        read = await self._apart.ask(("", text), {"parse": self._config.parse})
        return read.value, read.problem


def filled(template: str, prompt: Prompt, completion: Completion) -> str:
    """The question. What is filled in is taken as it is, whatever braces it has."""
    return template.format_map({**prompt.columns, "prompt": prompt.text, "completion": completion.text})


def check_parse(parse: str) -> None:
    """Raises ConfigError for what is no way to read an answer."""
    if parse == BY_NUMBER:
        return
    pattern = compiled(parse, PARSE, "use number, or an expression such as (?i)score: *([0-9.]+)")
    if pattern.groups != 1:
        problem = f"{parse!r} has {pattern.groups} groups, and one is read"
        raise ConfigError(problem, where=PARSE, remedy="put ( ) around the number alone, and (?: ) around others")


def check_template(template: str, columns: Set[str]) -> None:
    """Raises ConfigError for a template that cannot be filled in, or that leaves out the completion."""
    remedy = "write {prompt}, {completion} and columns in braces; {{ and }} are braces"
    try:
        parts = [(name, spec, how) for _, name, spec, how in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ConfigError(f"no template: {error}", where=TEMPLATE, remedy=remedy) from None
    for name, spec, how in parts:
        if name not in {"prompt", "completion", *columns} or spec or how:
            known = ", ".join(sorted({"prompt", "completion", *columns}))
            raise ConfigError(f"{{{name}}} is nothing that the prompts have ({known})", where=TEMPLATE, remedy=remedy)
    if "completion" not in {name for name, _, _ in parts}:
        raise ConfigError("the judge is not shown the completion", where=TEMPLATE, remedy=remedy)
