"""The prompts a config names: of a file, a data set or a built-in task, and the held-out ones beside them."""

from __future__ import annotations

import asyncio
import random
import warnings
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from rollyard import gym, verifiers
from rollyard.config import Config, PromptsConfig
from rollyard.errors import ConfigError
from rollyard.prompts.given import GivenSource
from rollyard.prompts.source import Epochs, Render, Row, Source, prompt_of
from rollyard.prompts.tables import read_data
from rollyard.prompts.tasks.task import TASKS, Task
from rollyard.protocols.rollouts import PromptSource
from rollyard.texts import visible
from rollyard.types import Prompt

if TYPE_CHECKING:
    from rollyard.model.tokenizer import Tokenizer

HELD_OUT_SEED = 0  # held-out problems are the same in every run
SHOWN = 120  # characters of a prompt that a warning shows
AT_ONCE = 64  # problems made before others have their turn: a run can be stopped meanwhile


def check_prompts(config: Config) -> frozenset[str]:
    """The columns that every prompt has. Raises ConfigError for what is wrong, as far as it shows without a tokenizer."""
    prompts = config.prompts
    if prompts.source == "given":
        return frozenset()
    if prompts.path or prompts.dataset or prompts.task.startswith(verifiers.PREFIX):
        rows = _data(prompts)
        _split(rows, prompts, config.run.seed)
        return frozenset.intersection(*(frozenset(row.columns) for row in rows))
    if prompts.epochs:
        remedy = "use 0; --steps says how long the run is"
        raise ConfigError("a task has no epochs, its problems never end", where="prompts.epochs", remedy=remedy)
    if prompts.task in TASKS:
        return frozenset({"answer"})
    gym.check(prompts.task, prompts.options)
    return frozenset({"answer", "problem"})


async def open_prompts(
    config: Config, tokenizer: Tokenizer, done: Set[int] = frozenset()
) -> tuple[PromptSource, tuple[Prompt, ...]]:
    """The stream to train on, and the held-out prompts. Raises ConfigError.

    Args:
        done: ids of the stream's prompts that are not to come again.
    """
    prompts, seed = config.prompts, config.run.seed
    render = _render(tokenizer, prompts)
    if prompts.source == "given":
        return GivenSource(render, prompts.waiting, tokenizer.decode), ()
    if prompts.task in TASKS:
        task = TASKS[prompts.task]
        made = map(partial(_task_row, task, HELD_OUT_SEED, held_out=True), range(prompts.held_out))
        apart: Iterable[tuple[int, Row] | None] = enumerate(made)
        source = Source(lambda place: (place, _task_row(task, seed, place, held_out=False)), render, None, done)
    elif prompts.task.startswith(gym.PREFIX):
        name, options = prompts.task, prompts.options
        apart = _numbered(gym.held_out(name, options, prompts.held_out))
        source = Source(lambda place: (place, _gym_row(gym.training(name, options, seed, place))), render, None, done)
    else:
        data = _data(prompts)
        _check_template(data, tokenizer)
        rows, apart = _split(data, prompts, seed)
        limit = prompts.epochs * len(rows) or None
        source = Source(Epochs(rows, shuffle=prompts.shuffle, seed=seed), render, limit, done)
    held_out: list[Prompt] = []
    for tries, found in enumerate(apart):
        if found is not None:
            held_out.append(prompt_of(len(held_out), *found, render))
        if tries % AT_ONCE == 0:
            await asyncio.sleep(0)
    return source, tuple(held_out)


def _data(prompts: PromptsConfig) -> list[Row]:
    """What has an end."""
    if prompts.task:
        tasks = verifiers.tasks(prompts.task, prompts.options)
        return [Row(messages, {verifiers.COLUMN: column}) for messages, column in tasks]
    return read_data(prompts)


def _check_template(rows: Sequence[Row], tokenizer: Tokenizer) -> None:
    """Raises ConfigError for a conversation that nothing could make tokens of, before the first prompt is asked."""
    talk = next((number for number, row in enumerate(rows) if not isinstance(row.prompt, str)), None)
    if talk is not None and not tokenizer.has_chat_template:
        problem = f"prompt {talk} is a conversation, and the tokenizer has no chat template"
        raise ConfigError(problem, where="model.path", remedy="give texts, or an instruct model")


def _numbered(problems: Iterable[gym.Problem | None]) -> Iterator[tuple[int, Row] | None]:
    numbers = count()
    for each in problems:
        yield None if each is None else (next(numbers), _gym_row(each))


def _task_row(task: Task, seed: int, index: int, *, held_out: bool) -> Row:
    problem = task.problem(seed, index, held_out=held_out)
    return Row(problem.prompt, {"answer": problem.answer})


def _gym_row(problem: gym.Problem) -> Row:
    return Row(problem.question, {"answer": problem.answer, "problem": {"source": list(problem.source), "entry": problem.entry}})


def _split(rows: list[Row], prompts: PromptsConfig, seed: int) -> tuple[list[tuple[int, Row]], list[tuple[int, Row]]]:
    """Rows to train on and held-out rows, drawn with the run's seed; each with its number in the file."""
    if prompts.held_out >= len(rows):
        problem = f"{prompts.held_out} of {len(rows)} prompts held out leave none to train on"
        raise ConfigError(problem, where="prompts.held_out", remedy=f"use less than {len(rows)}")
    chosen = set(random.Random(f"held out/{seed}").sample(range(len(rows)), prompts.held_out))
    numbered = list(enumerate(rows))
    return [pair for pair in numbered if pair[0] not in chosen], [pair for pair in numbered if pair[0] in chosen]


def _render(tokenizer: Tokenizer, prompts: PromptsConfig) -> Render:
    """Chat where there is a template and it is wanted; messages always need one. Built-in tasks have models without.

    Raises ConfigError for a system message that no template would put anywhere.
    """
    chat = prompts.chat and tokenizer.has_chat_template and prompts.task not in TASKS
    system = [{"role": "system", "content": prompts.system}] if prompts.system else []
    if system and not chat:
        problem = "a system message is put before the prompt by a chat template, and there is none"
        raise ConfigError(problem, where="prompts.system", remedy="leave it out, or use a model with a chat template")

    warned = False

    def render(number: int, row: Row) -> tuple[tuple[int, ...], str]:
        nonlocal warned
        if isinstance(row.prompt, str):
            text = said = row.prompt
            ids = tokenizer.chat([*system, {"role": "user", "content": text}]) if chat else tokenizer.encode(text)
        else:
            text = "\n".join(f"{message['role']}: {message['content']}" for message in row.prompt)
            said = "\n".join(message["content"] for message in row.prompt)
            ids = tokenizer.chat(row.prompt)
        warned = warned or _warn_of_unknown(tokenizer, number, said, ids)
        return ids, text

    return render


def _warn_of_unknown(tokenizer: Tokenizer, number: int, text: str, ids: Sequence[int]) -> bool:
    """Warn of a prompt that has what the tokenizer does not know. Was it so?"""
    unknown = tokenizer.unknown(text, ids)
    if unknown:
        shown = text if len(text) <= SHOWN else text[:SHOWN] + "..."
        parts = ", ".join(map(repr, dict.fromkeys(unknown)))[:SHOWN]
        problem = f"the tokenizer does not know {parts} of prompt {number}: {shown!r}"
        told = "the policy sees the same token for all of it; of further prompts like this nothing is said"
        warnings.warn(visible(f"{problem}; {told}"), RuntimeWarning, stacklevel=2)
    return bool(unknown)
