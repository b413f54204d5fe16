"""The environment that a config names, or that was given."""

from __future__ import annotations

import inspect
from typing import Any

from rollyard.episode.calculator import Calculator
from rollyard.errors import ConfigError
from rollyard.functions import Function, check_takes, load_function
from rollyard.protocols.rollouts import Ask, Environment
from rollyard.types import Prompt, Reward
from rollyard.verdict import cause_of

WHERE = "environment.name"
SHIPPED = {"calculator": Calculator}
OF_PACKAGES = {"verifiers": "rollyard.episode.verifiers:Verifiers"}  # they play in workers, as users' own
TAKES = "(ask, prompt)"


class FromFunction:
    """A function `async def episode(ask, prompt)` as an environment."""

    def __init__(self, function: Function) -> None:
        self._function = function

    async def episode(self, ask: Ask, prompt: Prompt) -> float | Reward | None:
        """As the function does it."""
        verdict: float | Reward | None = await self._function(ask, prompt)
        return verdict


def load_environment(name: str) -> Environment:
    """A shipped one, that of another package, or what `FILE.py:NAME` or `package.module:NAME` is.

    That is a class without arguments, or a coroutine function.

    Raises ConfigError saying what is wrong.
    """
    if name in SHIPPED:
        return SHIPPED[name]()
    name = OF_PACKAGES.get(name, name)
    if ":" not in name:
        remedy = f"one of: {', '.join((*SHIPPED, *OF_PACKAGES))}; or FILE.py:NAME, or package.module:NAME"
        raise ConfigError(f"there is no environment {name!r}", where=WHERE, remedy=remedy)
    found = load_function(name, WHERE, classes=True)
    if inspect.isclass(found):
        try:
            made = found()
        except (Exception, SystemExit) as error:  # a user's class may raise anything
            problem = f"{name} cannot be made: {cause_of(error)}"
            raise ConfigError(problem, where=WHERE, remedy="let it be made without arguments") from error
        return check_environment(made, name)
    return check_environment(found, name)


def check_environment(found: Any, name: str) -> Environment:
    """What is an environment, or a coroutine function that is one. Raises ConfigError for anything else."""
    plays = getattr(found, "episode", None)
    function = found if plays is None else plays
    if not inspect.iscoroutinefunction(function):
        problem = f"{name} has no coroutine `episode`, and is none"
        raise ConfigError(problem, where=WHERE, remedy=f"write `async def episode{TAKES}`, in a class or by itself")
    check_takes(function, 2, name, WHERE, TAKES)
    environment: Environment = FromFunction(function) if plays is None else found
    return environment
