"""A language model as judge: it is asked in words, and a number is read from its answer."""

from __future__ import annotations

import asyncio
import re
import string
from collections.abc import Awaitable, Callable, Set
from dataclasses import dataclass
from typing import Final

from rollyard.config import JudgeConfig
from rollyard.errors import ConfigError, EngineError, ScoringError, TimeLimitExceeded
from rollyard.reward.cache import Cache
from rollyard.types import LARGEST, Completion, Prompt, Reward

TEMPLATE, PARSE = "reward.judge.template", "reward.judge.parse"
NUMBER: Final = re.compile(r"(?<![\w.])[+-]?(?:\d+(?:\.\d+)?|\.\d+)(?![\w])(?!\.\d)")
SHOWN: Final = 200  # characters of an answer that a problem shows
KEPT: Final = 2**16  # verdicts, the oldest go first


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model wrote. `cut`: it was not done."""

    text: str
    cut: bool


Ask = Callable[[str], Awaitable[Answer]]


class Judge:
    """Asks a language model (protocols.Scorer). The same question is asked once: its verdict is kept, by content.

    Args:
        ask: gives the model's answer, tried as often as it may be. Raises EngineError.
        config: the template, how the answer is read, and the time limit.
        close: of whatever `ask` uses.

    Raises ConfigError for a template or a rule that cannot be used.
    """

    def __init__(self, ask: Ask, config: JudgeConfig, close: Callable[[], Awaitable[None]]) -> None:
        self._ask, self._config, self._close = ask, config, close
        self._read = reader(config.parse)
        self._cache = Cache(KEPT)
        self._gate = asyncio.Semaphore(config.concurrency * len(config.url))

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """No verdict where there is no answer in time, or none that can be read: it stands in the problem."""
        question = filled(self._config.template, prompt, completion)
        try:
            return Reward(await self._cache.verdict(question, lambda: self._asked(question)))
        except (ScoringError, TimeLimitExceeded, EngineError) as error:
            return Reward(None, problem=str(error))

    async def close(self) -> None:
        await self._cache.close()
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
            raise ScoringError(f"the judge was cut after {self._config.max_tokens} tokens: {shown}")
        number = self._read(answer.text)
        if number is None or not abs(number * self._config.scale) <= LARGEST:
            raise ScoringError(f"the judge's answer cannot be read by {self._config.parse!r}: {shown}")
        return number * self._config.scale


def filled(template: str, prompt: Prompt, completion: Completion) -> str:
    """The question. What is filled in is taken as it is, whatever braces it has."""
    return template.format_map({**prompt.columns, "prompt": prompt.text, "completion": completion.text})


def reader(parse: str) -> Callable[[str], float | None]:
    """What reads an answer: a number, or None where there is none to be had. Raises ConfigError.

    `number`: the only number in it; one written twice is one. Else the group of the expression, where it matches last.
    """
    if parse == "number":
        return _only_number
    try:
        pattern = re.compile(parse)
    except re.error as error:
        remedy = "use number, or an expression such as (?i)score: *([0-9.]+)"
        raise ConfigError(f"{parse!r} is no regular expression: {error}", where=PARSE, remedy=remedy) from None
    if pattern.groups != 1:
        problem = f"{parse!r} has {pattern.groups} groups, and one is read"
        raise ConfigError(problem, where=PARSE, remedy="put ( ) around the number alone, and (?: ) around others")

    def read(text: str) -> float | None:
        found = [match[1] for match in pattern.finditer(text) if match[1] is not None]
        return _number(found[-1]) if found else None

    return read


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


def _only_number(text: str) -> float | None:
    found = {_number(each) for each in NUMBER.findall(text)}
    return found.pop() if len(found) == 1 else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
