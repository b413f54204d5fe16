"""Which judges a run has: those given in Python, those that the config names, or the task's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from rollyard.config import Config, RewardConfig
from rollyard.errors import ConfigError
from rollyard.pool import Launch
from rollyard.protocols.rollouts import Scorer
from rollyard.reward import shipped
from rollyard.reward.combine import Combined, Part, check_parts
from rollyard.reward.direct import Direct
from rollyard.reward.function import WHERE, RewardFunction, Takes, check_columns, check_function, load_reward, name_of
from rollyard.reward.gym import reasoning_gym
from rollyard.reward.host import Source
from rollyard.reward.judge import BY_NUMBER, PARSE
from rollyard.reward.origin import import_name, pickled
from rollyard.reward.reading import by_expression, compiled
from rollyard.reward.workers import Crew, InWorkers
from rollyard.types import Completion, Prompt, Reward

Given = RewardFunction | Mapping[str, RewardFunction] | Sequence[RewardFunction]
MODEL, JUDGE, REMOTE = "reward_model", "judge", "remote"  # names in reports
OF_TASKS: Mapping[str, tuple[str, ...]] = {"reasoning_gym": ("reasoning_gym",), "verifiers": ()}  # else exact match
FOR_WORKERS = (
    "time_limit_s",
    "workers",
    "start_s",
    "memory_mib",
    "give_up_after",
)  # options of the processes that functions run in


def _none(config: Config) -> Mapping[str, object]:
    return {}


def _pattern(config: Config) -> Mapping[str, object]:
    return {"pattern": _expression(config.reward.pattern, "reward.pattern")}


def _form(config: Config) -> Mapping[str, object]:
    return {"form": _expression(config.reward.format, "reward.format")}


def _expression(text: str, where: str) -> str:
    compiled(text, where)
    if not text:
        raise ConfigError("nothing is looked for", where=where, remedy=f"give --{where} REGEX")
    return text


def _buffer(config: Config) -> Mapping[str, object]:
    buffer, most = config.reward.overlong_buffer, config.rollout.max_tokens
    if buffer > most:
        problem = f"a buffer of {buffer} tokens is longer than a completion of {most}"
        raise ConfigError(problem, where="reward.overlong_buffer", remedy=f"use at most {most}, or 0 for a fifth of it")
    return {"buffer": buffer or max(1, most // 5)}


@dataclass(frozen=True, slots=True)
class Shipped:
    """A function of ours.

    `direct`: it is quick and cannot hang. `settings`: what it is given besides columns, by the `option` if one alone says it.
    `needs`: a package, and the extra that has it.
    """

    function: RewardFunction
    direct: bool = True
    settings: Callable[[Config], Mapping[str, object]] = _none
    option: str = ""
    needs: tuple[str, str] = ("", "")


SHIPPED: Mapping[str, Shipped] = {
    "exact_match": Shipped(shipped.exact_match),
    "unjudged": Shipped(shipped.unjudged),
    "numeric_match": Shipped(shipped.numeric_match),
    "regex": Shipped(shipped.regex, direct=False, settings=_pattern, option="pattern"),
    "format": Shipped(shipped.format, direct=False, settings=_form, option="format"),
    "length_penalty": Shipped(shipped.length_penalty),
    "soft_overlong": Shipped(shipped.soft_overlong, settings=_buffer, option="overlong_buffer"),
    "math_verify": Shipped(shipped.math_verify, direct=False, needs=("math_verify", "math")),
    "reasoning_gym": Shipped(reasoning_gym, direct=False),
}


@dataclass(frozen=True, slots=True)
class Judge:
    """A function that judges, by its name in reports.

    `source` says where a worker process finds it; where that is nowhere, it gets it as a file.
    """

    name: str
    function: RewardFunction
    source: Source
    direct: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)

    def content(self) -> bytes:
        """Of that file. Raises ConfigError when it cannot leave this process."""
        return b"" if self.source.load else pickled(self.function, self.name, WHERE)


class Nobody:
    """In the place of a judge where environments judge their own episodes (protocols.Scorer)."""

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """No verdict: the environment gave none either."""
        return Reward(None, problem="the environment gave no verdict, and no reward is configured")

    async def close(self) -> None:
        pass


def judges_of(config: Config, given: Given | None, *, optional: bool = False) -> tuple[tuple[Judge, float], ...]:
    """The functions and their weights; none where models alone judge.

    Args:
        optional: nobody need judge.

    Raises ConfigError when nobody does, or weights do not go with them.
    """
    others = others_of(config)
    judges = _given(given, config) if given is not None else _named(config, optional or bool(others))
    _check_options(config, judges)
    _check_workers(config, judges)
    if not judges and optional and not config.reward.weights and not others:
        return ()
    weights = config.reward.weights or (1.0,) * len(judges)
    if len(weights) != len(judges):
        problem = f"{len(weights)} weights for {len(judges)} rewards"
        raise ConfigError(problem, where="reward.weights", remedy="give each reward one, or leave them out")
    found = tuple(zip(judges, weights, strict=True))
    check_parts([*((judge.name, weight) for judge, weight in found), *others])
    return found


def _check_options(config: Config, judges: Sequence[Judge]) -> None:
    """An option of a reward that does not judge is a mistake."""
    for name, ours in SHIPPED.items():
        if ours.option and _changed(config, ours.option) and all(judge.function is not ours.function for judge in judges):
            problem = f"it is for the reward called {name}, which does not judge"
            raise ConfigError(problem, where=f"reward.{ours.option}", remedy=f"leave it out, or add {name} to reward.function")


def reads_in_workers(config: Config) -> bool:
    """Is a judge's answer read by a function, which may hang?"""
    return bool(config.reward.judge.url) and config.reward.judge.parse != BY_NUMBER


def _check_workers(config: Config, judges: Sequence[Judge]) -> None:
    """So is one of worker processes that nobody needs."""
    takes, reads = [Takes.of(judge.function) for judge in judges if not judge.direct], reads_in_workers(config)
    for names, heeded, problem in (
        (FOR_WORKERS, takes or reads, "no reward is judged in a worker process"),
        (("concurrency",), any(each.asynchronous for each in takes), "no reward is a coroutine function"),
        (("batch",), any(each.batched for each in takes), "no reward is a function of several (prompts, completions)"),
    ):
        name = next((name for name in names if _changed(config, name)), "")
        if name and not heeded:
            raise ConfigError(problem, where=f"reward.{name}", remedy="leave it out, or name such a function in reward.function")


def _changed(config: Config, option: str) -> bool:
    return bool(getattr(config.reward, option) != RewardConfig.model_fields[option].default)


def others_of(config: Config) -> list[tuple[str, float]]:
    """Names and weights of judges that are no functions: a sequence classifier, a language model, an address."""
    model, judge, remote = config.reward.model, config.reward.judge, config.reward.remote
    known = ((MODEL, model.folder, model.weight), (JUDGE, judge.url, judge.weight), (REMOTE, remote.url, remote.weight))
    return [(name, weight) for name, there, weight in known if there]


def check_rewards(config: Config, given: Given | None, columns: Set[str], *, optional: bool = False) -> None:
    """Raises ConfigError when a reward cannot judge prompts with these columns, or cannot be given to a worker process."""
    for judge, _ in judges_of(config, given, optional=optional):
        check_columns(judge.function, columns, judge.settings.keys())
        if not judge.direct:
            judge.content()


def open_functions(config: Config, given: Given | None, launch: Launch, scratch: Path, *, optional: bool = False) -> list[Part]:
    """The functions; their worker processes begin to start. Raises ConfigError, also where there is none.

    Args:
        launch: starts a child of this process.
        scratch: the run's folder.
        optional: nobody need judge.
    """
    found, max_tokens = judges_of(config, given, optional=optional), config.rollout.max_tokens
    away = [judge for judge, _ in found if not judge.direct]
    crew = Crew(config.reward, launch, [(judge.source, judge.content()) for judge in away], scratch)
    parts: list[Part] = []
    for judge, weight in found:
        if judge.direct:
            scorer: Scorer = Direct(judge.name, judge.function, judge.settings, max_tokens)
        else:
            takes = Takes.of(judge.function)
            scorer = workers = InWorkers(judge.name, away.index(judge), takes, judge.settings, crew, max_tokens)
            workers.start()
        parts.append(Part(judge.name, scorer, weight))
    return parts


def open_reading(config: Config, launch: Launch, scratch: Path) -> InWorkers | None:
    """What reads a judge's answers by the user's expression, in a process that begins to start; None where there is none.

    Args:
        launch: starts a child of this process.
        scratch: the run's folder.
    """
    if config.reward.judge.parse == BY_NUMBER:
        return None
    crew = Crew(config.reward, launch, [(Source("parse", load=import_name(by_expression)), b"")], scratch)
    reading = InWorkers(PARSE, 0, Takes.of(by_expression), {}, crew, config.reward.judge.max_tokens)
    reading.start()
    return reading


def joined(config: Config, functions: Sequence[Part], others: Mapping[str, Scorer]) -> Scorer:
    """All judges of a run as one.

    Args:
        others: by their names in `others_of`.
    """
    parts = [*functions, *(Part(name, others[name], weight) for name, weight in others_of(config))]
    return Combined(parts) if parts else Nobody()


def _given(given: Given, config: Config) -> list[Judge]:
    if isinstance(given, Mapping):
        found = [(str(name), function) for name, function in given.items()]
    else:
        functions = given if isinstance(given, Sequence) else [given]
        found = [(name_of(function), function) for function in functions]
    return [_judge(name, function, config) for name, function in found]


def _judge(name: str, function: RewardFunction, config: Config) -> Judge:
    check_function(function, name)
    for ours in SHIPPED.values():
        if function is ours.function:
            return _shipped(name, ours, config)
    return Judge(name, function, Source(name, load=import_name(function)))


def _shipped(name: str, ours: Shipped, config: Config) -> Judge:
    package, extra = ours.needs
    if package and find_spec(package) is None:
        problem = f"{name} needs {package.replace('_', '-')}, which is not installed"
        raise ConfigError(problem, where=WHERE, remedy=f"pip install 'rollyard[{extra}]'")
    source = Source(name, load=import_name(ours.function), needs=package)
    return Judge(name, ours.function, source, ours.direct, ours.settings(config))


def _named(config: Config, optional: bool) -> list[Judge]:
    names = config.reward.function
    if not names and config.prompts.task:
        names = OF_TASKS.get(config.prompts.task.partition("/")[0], ("exact_match",))
    if not names and not optional:
        raise ConfigError("prompts from a file need a reward", where=WHERE, remedy="give --reward FILE.py:function")
    return [_load(name, config) for name in names]


def _load(name: str, config: Config) -> Judge:
    if name in SHIPPED:
        return _shipped(name, SHIPPED[name], config)
    if ":" not in name:
        remedy = f"one of: {', '.join(SHIPPED)}; or give FILE.py:function or package.module:function"
        raise ConfigError(f"there is no reward called {name!r}", where=WHERE, remedy=remedy)
    function = load_reward(name)
    return Judge(name.rpartition(":")[2], function, Source(name_of(function), load=name))
