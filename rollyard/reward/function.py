"""Ordinary functions as judges: what each takes, and whether the prompts have it.

    (prompt, completion, **columns) -> float                     one completion at a time, sync or async
    (prompts, completions, **columns) -> list[float]             several at once, by name, sync or async

A function that has a parameter `completions` is of the second kind; the columns are lists then, as long as the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from rollyard.errors import ConfigError
from rollyard.functions import POSITIONAL, Function, check_callable, check_takes, load_function
from rollyard.types import Completion, Prompt

RewardFunction = Function
WHERE = "reward.function"
VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
TEXTS = ("prompts", "completions")  # of a function that judges several at once
FACTS = ("tokens", "max_tokens", "finish")  # of a completion, for functions that name them


@dataclass(frozen=True, slots=True)
class Takes:
    """What a function is given.

    `columns` None: all of them. `facts` are those of `FACTS` that it names, `texts` those of `TEXTS`.
    """

    asynchronous: bool
    batched: bool
    columns: frozenset[str] | None
    facts: frozenset[str]
    texts: tuple[str, ...]

    @classmethod
    def of(cls, function: RewardFunction) -> Takes:
        """What this one takes."""
        parameters = list(inspect.signature(function).parameters.values())
        batched = is_batched(parameters)
        names = frozenset(parameter.name for parameter in _further(parameters, batched) if parameter.kind in BY_NAME)
        any_ = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
        return cls(
            asynchronous=inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__),
            batched=batched,
            columns=None if any_ else names - set(FACTS),
            facts=names & set(FACTS),
            texts=tuple(name for name in TEXTS if any_ or any(parameter.name == name for parameter in parameters)),
        )

    def arguments(self, prompt: Prompt, completion: Completion, max_tokens: int) -> dict[str, object]:
        """What it is given besides prompt and completion."""
        known = {"tokens": len(completion.token_ids), "max_tokens": max_tokens, "finish": completion.finish.value}
        columns = prompt.columns
        given = {name: columns[name] for name in columns if self.columns is None or name in self.columns}
        return given | {name: known[name] for name in self.facts}


def load_reward(name: str) -> RewardFunction:
    """Import `FILE.py:function` or `package.module:function`. Raises ConfigError saying what went wrong."""
    function = load_function(name, WHERE)
    check_function(function, name)
    return function


def name_of(function: RewardFunction) -> str:
    """What it is called in reports."""
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")  # of a lambda


def check_function(function: Any, name: str) -> None:
    """Raises ConfigError when it cannot be called with (prompt, completion), or by the names of several."""
    parameters = list(inspect.signature(check_callable(function, name, WHERE)).parameters.values())
    if not is_batched(parameters):
        check_takes(function, 2, name, WHERE, "(prompt, completion, **columns)")


def check_columns(function: RewardFunction, columns: Set[str], settings: Set[str] = frozenset()) -> None:
    """Raises ConfigError when the function cannot be given the columns, or needs one that the prompts do not have.

    Args:
        settings: what it is given besides, by name.
    """
    parameters = list(inspect.signature(function).parameters.values())
    more = _further(parameters, is_batched(parameters))
    facts = {parameter.name for parameter in more if parameter.kind in BY_NAME} & {*FACTS, *settings}
    _check_names(parameters, more, columns)
    for name in sorted(facts & columns):
        problem = f"the prompts have a column {name!r}, and the reward is given something else by that name"
        raise ConfigError(problem, where=WHERE, remedy="rename the column")
    for parameter in more:
        name, given = parameter.name, parameter.name in columns or parameter.name in facts
        if given and parameter.kind is Parameter.POSITIONAL_ONLY:
            problem = f"the reward takes {name!r} by position only, and columns are given by name"
            raise ConfigError(problem, where=WHERE, remedy="put the / right after the second parameter")
        if not given and parameter.kind not in VARIABLE and parameter.default is Parameter.empty:
            remedy = f"the prompts have: {', '.join(sorted(columns)) or 'no columns'}"
            raise ConfigError(f"the reward needs a column {name!r}", where=WHERE, remedy=remedy)


def is_batched(parameters: list[Parameter]) -> bool:
    """It judges several at once."""
    return any(parameter.name == "completions" and parameter.kind in BY_NAME for parameter in parameters)


def _check_names(parameters: list[Parameter], more: list[Parameter], columns: Set[str]) -> None:
    """No column may have the name of what takes a text: it would be given twice."""
    takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    texts = {p.name for p in parameters if p not in more and p.kind in BY_NAME} if takes_all else set()
    if is_batched(parameters):
        texts = set(TEXTS)
    for name in sorted(texts & columns):
        problem = f"the prompts have a column {name!r}, and so is called what the reward takes as prompt or completion"
        raise ConfigError(problem, where=WHERE, remedy="rename one of them")


def _further(parameters: list[Parameter], batched: bool) -> list[Parameter]:
    """All but those that take prompt and completion: the first two positional ones, or those of these names."""
    if batched:
        return [parameter for parameter in parameters if parameter.name not in TEXTS]
    positional = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
    return [parameter for parameter in parameters if parameter not in positional[:2]]


def batch_columns(arguments: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Arguments of several calls as lists; None where one of them has none of a name."""
    names = dict.fromkeys(name for one in arguments for name in one)
    return {name: [one.get(name) for one in arguments] for name in names}
