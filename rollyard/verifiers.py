"""Task sets of the package `verifiers`, by name: what prompts and episodes both need to know of a task.

Only this module and `episode.verifiers` know the package (its interface `verifiers.v1`). What a task is judged by stays there: a
prompt has a column that names it, by its place in the task set and by its identity.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rollyard.errors import ConfigError
from rollyard.texts import in_a_line

if TYPE_CHECKING:
    from verifiers.v1 import Env, EnvConfig, Task

PREFIX: Final = "verifiers/"  # of such a task set in `prompts.task`
NAME: Final = "verifiers"  # of what plays them, in `environment.name`
COLUMN: Final = "task"
WHERE: Final = "prompts.task"
LOCAL: Final = '{"agent": {"runtime": {"type": "subprocess"}}}'

Message = Mapping[str, str]


class Named(NamedTuple):
    """A task set, and options of its environment (a JSON object)."""

    taskset: str
    options: str


class Asked(NamedTuple):
    """A task as a prompt: what the policy is told, and the column that leads back to it."""

    messages: tuple[Message, ...]
    column: Mapping[str, object]


def tasks(task: str, options: str) -> Iterator[Asked]:
    """All of them, in order.

    Raises ConfigError when the package is not there, has no such task set, or that does not take these options; and for a task
    that the policy cannot be asked.
    """
    named = Named(task.removeprefix(PREFIX), options)
    for number, found in enumerate(_tasks(named)):
        messages = _messages(found, f"{PREFIX}{named.taskset}, task {number}")
        yield Asked(messages, {**named._asdict(), "number": number, "key": found.key})


def task_of(column: Mapping[str, Any]) -> Task:
    """The task that a prompt's column names. Raises ConfigError when the task set has another one in its place by now."""
    named, number = Named(column["taskset"], column["options"]), column["number"]
    found = _tasks(named)
    if number >= len(found) or found[number].key != column["key"]:
        problem = f"task {number} of {named.taskset} is not the one that the prompt was made of"
        raise ConfigError(problem, where=WHERE, remedy="use a task set that gives the same tasks each time it is loaded")
    return found[number]


@lru_cache(maxsize=4)
def environment(named: Named) -> Env[Any]:
    """The environment of a task set. Raises ConfigError when it cannot be made."""
    try:
        from verifiers.v1.utils.loaders import load_environment, resolve_env_config
    except ImportError as error:
        problem = f"{PREFIX}{named.taskset} needs verifiers, which is not installed ({in_a_line(error)})"
        raise ConfigError(problem, where=WHERE, remedy="pip install 'rollyard[verifiers]'") from None
    given = json.loads(named.options or "{}")
    try:
        config = resolve_env_config(given | {"taskset": given.get("taskset", {}) | {"id": named.taskset}})
        _check_place(config)
        found: Env[Any] = load_environment(config)
    except ConfigError:
        raise
    except Exception as error:  # a package of somebody else's may raise anything
        problem = f"{PREFIX}{named.taskset} cannot be made: {type(error).__name__}: {in_a_line(error)}"
        remedy = f"name an installed task set; its options are those of verifiers' environment, such as {LOCAL}"
        raise ConfigError(problem, where=WHERE, remedy=remedy) from error
    if not found.taskset.bounded:
        problem = f"{PREFIX}{named.taskset} has no end, and prompts are held out and shuffled by their number"
        raise ConfigError(problem, where=WHERE, remedy="use one that ends")
    return found


def _check_place(config: EnvConfig) -> None:
    """verifiers plays in sandboxes of a provider unless something else is said: that is to be said."""
    from verifiers.v1.configs.agent import agent_config_fields

    for role, agent in agent_config_fields(config).items():
        if agent.runtime.type == "prime":
            problem = f"where {role} plays is not said, and verifiers would rent sandboxes for it"
            remedy = f"give such as {LOCAL.replace('agent', role)}, or docker"
            raise ConfigError(problem, where="prompts.options", remedy=remedy)


@lru_cache(maxsize=4)
def _tasks(named: Named) -> list[Task]:
    taskset = environment(named).taskset
    try:
        return list(taskset)
    except Exception as error:  # loading one may raise anything
        problem = f"the tasks of {named.taskset} cannot be loaded: {type(error).__name__}: {in_a_line(error)}"
        raise ConfigError(problem, where=WHERE, remedy="see what it needs") from error


def _messages(task: Task, where: str) -> tuple[Message, ...]:
    """What opens the conversation."""
    data = task.data
    system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str) and data.prompt:
        return (*system, {"role": "user", "content": data.prompt})
    if not data.prompt:
        raise ConfigError("a task without a prompt: its user would open the conversation", where=where, remedy="use another one")
    messages = [{"role": str(each.role), "content": each.content} for each in data.prompt]
    if not all(isinstance(each["content"], str) for each in messages):
        raise ConfigError("a prompt with more than text in it", where=where, remedy="use a task set of texts")
    return (*system, *messages)
