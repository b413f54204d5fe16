"""Which judges a run has: those given in Python, those that the config names, or the task's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from rollyard.config import BUILT_IN, Config
from rollyard.errors import ConfigError
from rollyard.protocols import Scorer
from rollyard.reward.combine import Combined, Part, check_parts
from rollyard.reward.function import (
    WHERE,
    FunctionScorer,
    RewardFunction,
    check_columns,
    check_function,
    exact_match,
    load_reward,
)
from rollyard.reward.gym import reasoning_gym
from rollyard.types import Completion, Prompt, Reward

Given = RewardFunction | Mapping[str, RewardFunction] | Sequence[RewardFunction]
MODEL, JUDGE = "reward_model", "judge"  # names in reports
NO_MODELS: Mapping[str, Scorer] = {}
SHIPPED: Mapping[str, RewardFunction] = {"exact_match": exact_match, "reasoning_gym": reasoning_gym}


@dataclass(frozen=True, slots=True)
class Judge:
    """A function that judges, by its name in reports."""

    name: str
    function: RewardFunction
    weight: float


class Nobody:
    """In the place of a judge where environments judge their own episodes (protocols.Scorer)."""

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """No verdict: the environment gave none either."""
        return Reward(None, problem="the environment gave no verdict, and no reward is configured")

    async def close(self) -> None:
        pass


def judges_of(config: Config, given: Given | None, *, optional: bool = False) -> tuple[Judge, ...]:
    """The functions; none where models alone judge. Raises ConfigError when nobody does, or weights do not go with them.

    Args:
        optional: nobody need judge.
    """
    found = _given(given) if given is not None else _named(config, optional or bool(models_of(config)))
    if not found and optional and not config.reward.weights and not models_of(config):
        return ()
    weights = config.reward.weights or (1.0,) * len(found)
    if len(weights) != len(found):
        problem = f"{len(weights)} weights for {len(found)} rewards"
        raise ConfigError(problem, where="reward.weights", remedy="give each reward one, or leave them out")
    check_parts([*((name, weight) for (name, _), weight in zip(found, weights, strict=True)), *models_of(config)])
    return tuple(Judge(name, function, weight) for (name, function), weight in zip(found, weights, strict=True))


def models_of(config: Config) -> list[tuple[str, float]]:
    """Names and weights of the models that judge: a sequence classifier, a language model."""
    reward = config.reward
    found = [(MODEL, reward.model.weight)] if reward.model.folder else []
    return [*found, (JUDGE, reward.judge.weight)] if reward.judge.url else found


def check_rewards(config: Config, given: Given | None, columns: Set[str], *, optional: bool = False) -> None:
    """Raises ConfigError when a reward cannot judge prompts with these columns."""
    for judge in judges_of(config, given, optional=optional):
        check_columns(judge.function, columns)


def open_scorer(
    config: Config, given: Given | None, models: Mapping[str, Scorer] = NO_MODELS, *, optional: bool = False
) -> Scorer:
    """All judges of a run as one. Raises ConfigError, also where there is none unless that is `optional`.

    Args:
        models: those that judge, by their names in `models_of`.
    """
    parts = [
        Part(judge.name, FunctionScorer(judge.function, config.reward, trusted=judge.function is exact_match), judge.weight)
        for judge in judges_of(config, given, optional=optional)
    ]
    parts += [Part(name, models[name], weight) for name, weight in models_of(config)]
    return Combined(parts) if parts else Nobody()


def _given(given: Given) -> list[tuple[str, RewardFunction]]:
    if isinstance(given, Mapping):
        found = [(str(name), function) for name, function in given.items()]
    else:
        functions = given if isinstance(given, Sequence) else [given]
        found = [(getattr(function, "__name__", type(function).__name__), function) for function in functions]
    for name, function in found:
        check_function(function, name)
    return found


def _named(config: Config, optional: bool) -> list[tuple[str, RewardFunction]]:
    names = config.reward.function
    if not names and config.prompts.task:
        names = ("exact_match" if config.prompts.task in BUILT_IN else "reasoning_gym",)
    if not names and not optional:
        raise ConfigError("prompts from a file need a reward", where=WHERE, remedy="give --reward FILE.py:function")
    return [(name.rpartition(":")[2], _load(name)) for name in names]


def _load(name: str) -> RewardFunction:
    if name in SHIPPED:
        return SHIPPED[name]
    if ":" not in name:
        remedy = f"one of: {', '.join(SHIPPED)}; or give FILE.py:function or package.module:function"
        raise ConfigError(f"there is no reward called {name!r}", where=WHERE, remedy=remedy)
    return load_reward(name)
