"""Ordinary functions as judges: `(prompt, completion, **columns) -> float`, sync or async."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Set
from inspect import Parameter
from typing import Any

from rollyard.config import RewardConfig
from rollyard.errors import ConfigError, TimeLimitExceeded
from rollyard.functions import POSITIONAL, Function, check_callable, check_takes, load_function
from rollyard.reward.threads import Outcome, Workers
from rollyard.reward.verdict import number_of
from rollyard.types import Completion, Prompt, Reward

RewardFunction = Function
WHERE = "reward.function"
VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def exact_match(prompt: str, completion: str, answer: str) -> float:
    """1 when the completion is the answer and nothing else, 0 otherwise. Judges the built-in tasks."""
    return float(completion == answer)


class FunctionScorer:
    """Judges with one function (protocols.Scorer).

    A judgement that fails, that is no number, or that takes too long is no verdict: never 0, never an exception.

    Args:
        function: takes (prompt, completion) as texts and the columns by name: all of them with `**columns`, else those
            it names.
        config: the time limit and how many judgements run at a time.
        trusted: it is quick and cannot hang: called directly instead of on a worker thread.
    """

    def __init__(self, function: RewardFunction, config: RewardConfig, *, trusted: bool = False) -> None:
        check_function(function, WHERE)
        self._function = function
        self._name = getattr(function, "__name__", type(function).__name__)
        self._config = config
        self._direct = trusted
        self._async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        self._accepted = _accepted_columns(function)
        self._workers = Workers(config.concurrency)
        self._gate = asyncio.Semaphore(config.concurrency)

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """Raises ScoringError only when the workers are used up by judgements that never ended."""
        columns = self._columns(prompt.columns)
        if self._direct:
            return self._verdict(self._function(prompt.text, completion.text, **columns))
        async with self._gate:
            try:
                outcome = await self._call(prompt.text, completion.text, columns)
            except TimeLimitExceeded as error:
                return Reward(None, problem=str(error))
        if outcome.error is not None:
            return Reward(None, problem=f"{type(outcome.error).__name__}: {outcome.error}")
        return self._verdict(outcome.value)

    async def close(self) -> None:
        self._workers.close()

    async def _call(self, prompt: str, completion: str, columns: Mapping[str, object]) -> Outcome:
        limit = self._config.time_limit_s
        if not self._async:
            return await self._workers.call(limit, self._function, prompt, completion, **columns)
        try:
            async with asyncio.timeout(limit) as clock:
                return Outcome(value=await self._function(prompt, completion, **columns))
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises is a missing verdict, told with its cause
            if clock.expired():
                raise TimeLimitExceeded(f"no verdict within {limit:g} s") from None
            return Outcome(error=error)

    def _columns(self, columns: Mapping[str, object]) -> Mapping[str, object]:
        if self._accepted is None:
            return columns
        return {name: value for name, value in columns.items() if name in self._accepted}

    def _verdict(self, value: Any) -> Reward:
        number, problem = number_of(value, self._name)
        return Reward(None, problem=problem) if number is None else Reward(number, {self._name: number})


def load_reward(name: str) -> RewardFunction:
    """Import `FILE.py:function` or `package.module:function`. Raises ConfigError saying what went wrong."""
    function = load_function(name, WHERE)
    check_function(function, name)
    return function


def check_function(function: Any, name: str) -> None:
    """Raises ConfigError when it cannot be called with (prompt, completion)."""
    check_takes(check_callable(function, name, WHERE), 2, name, WHERE, "(prompt, completion, **columns)")


def check_columns(function: RewardFunction, columns: Set[str]) -> None:
    """Raises ConfigError when the function cannot be given the columns, or needs one that the prompts do not have."""
    parameters = list(inspect.signature(function).parameters.values())
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    more = _column_parameters(parameters)
    for parameter in parameters:
        name, given = parameter.name, parameter.name in columns
        if given and parameter not in more and takes_all and parameter.kind is Parameter.POSITIONAL_OR_KEYWORD:
            problem = f"the prompts have a column {name!r}, and so is called what the reward takes as prompt or completion"
            raise ConfigError(problem, where=WHERE, remedy="rename one of them")
        if given and parameter in more and parameter.kind is Parameter.POSITIONAL_ONLY:
            problem = f"the reward takes {name!r} by position only, and columns are given by name"
            raise ConfigError(problem, where=WHERE, remedy="put the / right after the second parameter")
        needed = parameter in more and parameter.kind not in VARIABLE and parameter.default is Parameter.empty
        if needed and not given:
            remedy = f"the prompts have: {', '.join(sorted(columns)) or 'no columns'}"
            raise ConfigError(f"the reward needs a column {name!r}", where=WHERE, remedy=remedy)


def _accepted_columns(function: RewardFunction) -> frozenset[str] | None:
    """Names it takes besides prompt and completion; None when it takes any."""
    parameters = list(inspect.signature(function).parameters.values())
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    return frozenset(parameter.name for parameter in _column_parameters(parameters) if parameter.kind in by_name)


def _column_parameters(parameters: list[Parameter]) -> list[Parameter]:
    """All but the first two positional ones, which take prompt and completion."""
    positional = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
    return [parameter for parameter in parameters if parameter not in positional[:2]]
