"""Tasks of reasoning-gym, by name: problems from a seed, and how it judges an answer to one.

A problem is named by what makes it again, so that whoever judges needs nothing but that name.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from rollyard.errors import ConfigError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

PREFIX: Final = "reasoning_gym/"  # of such a task in `prompts.task`
WHERE: Final = "prompts.task"
SIZE: Final = 500  # problems of one seed, as many as a dataset has by default; then another seed follows
HELD_OUT_IN: Final = 8  # one problem in this many, by content, belongs to the held-out side
TRIES: Final = 100  # for a problem of the wanted side; of each held-out one that is asked for
OWN: Final = ("seed", "size")  # options that the stream sets


class Name(NamedTuple):
    """Which problem: the one at this place of a dataset with this seed. `options` is a JSON object."""

    dataset: str
    options: str
    seed: int
    place: int


class Problem(NamedTuple):
    """A question, and its answer where there is a single one. Example: Problem(Name(...), "4 + 3 =", "7")."""

    name: Name
    question: str
    answer: str | None

    @property
    def held_out(self) -> bool:
        """Which side a problem is on is a matter of its question alone: no seed ever trains on a held-out one."""
        return hashlib.blake2b(self.question.encode(), digest_size=1).digest()[0] % HELD_OUT_IN == 0


def check(task: str, options: str) -> None:
    """Raises ConfigError when reasoning-gym is not there, has no such dataset, or that does not take these options."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        remedy = "pip install 'rollyard[gym]'"
        raise ConfigError(f"{task} needs reasoning-gym, which is not installed ({error})", where=WHERE, remedy=remedy) from None
    name = task.removeprefix(PREFIX)
    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        remedy = f"did you mean {' or '.join(PREFIX + each for each in near)}?" if near else f"such as {PREFIX}chain_sum"
        raise ConfigError(f"reasoning-gym has no dataset {name!r}", where=WHERE, remedy=remedy)
    if set(OWN) & json.loads(options or "{}").keys():
        problem = f"{' and '.join(OWN)} of a dataset come from the stream's place and the run's seed"
        raise ConfigError(problem, where="prompts.options", remedy="leave them out")
    problem_of(Name(name, options, 0, 0))


def training(task: str, options: str, seed: int, place: int) -> Problem:
    """The problem at a place of the endless stream of a run's seed, never a held-out one. Raises ConfigError."""
    name = task.removeprefix(PREFIX)
    chunk, index = divmod(place, SIZE)
    for attempt in range(TRIES):
        problem = problem_of(Name(name, options, _seed(f"{name}/{seed}/{chunk}/{attempt}"), index))
        if not problem.held_out:
            return problem
    raise _exhausted(task, "trained on", 0)


def held_out(task: str, options: str, wanted: int) -> tuple[Problem, ...]:
    """So many different problems, the same in every run, none of them in any training stream. Raises ConfigError."""
    name = task.removeprefix(PREFIX)
    found: dict[str, Problem] = {}
    for number, problem in enumerate(_all(name, options)):
        if len(found) == wanted:
            break
        if number > TRIES * wanted:
            raise _exhausted(task, "held out", len(found))
        if problem.held_out:
            found.setdefault(problem.question, problem)
    return tuple(found.values())


def score(name: Name, completion: str) -> float:
    """What reasoning-gym gives the answer in a completion, 0 to 1.

    The answer is what stands in the last `<answer>` tags, as its own prompts ask for; without any it is the whole
    completion, white space around it left out.
    """
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(completion)
    dataset = _dataset(name.dataset, name.options, name.seed)
    return float(dataset.score_answer(completion.strip() if answer is None else answer, _entry(name)))


def problem_of(name: Name) -> Problem:
    """The problem of this name. Raises ConfigError when its dataset cannot make one with these options."""
    entry = _entry(name)
    return Problem(name, entry["question"], entry["answer"])


def _all(name: str, options: str) -> Iterator[Problem]:
    for chunk in count():
        seed = _seed(f"{name}/held out/{chunk}")
        yield from (problem_of(Name(name, options, seed, index)) for index in range(SIZE))


def _seed(text: str) -> int:
    """32 bits: datasets add the index to it, so neighbouring seeds would have nearly the same problems."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


@lru_cache(maxsize=512)  # the members of a group are judged by the same one, and some take a second to make
def _entry(name: Name) -> dict[str, Any]:
    dataset = _dataset(name.dataset, name.options, name.seed)
    try:
        return dict(dataset[name.place])
    except Exception as error:  # a dataset may raise anything
        raise _refused(name.dataset, name.options, error) from error


@lru_cache(maxsize=16)
def _dataset(name: str, options: str, seed: int) -> ProceduralDataset:
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    given = json.loads(options or "{}")
    known = [field.name for field in dataclasses.fields(DATASETS[name][1]) if field.name not in OWN]
    for option in given:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            remedy = f"did you mean {near[0]}?" if near else f"it has: {', '.join(known)}"
            raise ConfigError(f"{name} has no option {option!r}", where="prompts.options", remedy=remedy)
    try:
        if name == "composite":
            given["datasets"] = [DatasetSpec(**each) for each in given.get("datasets", ())]
        return create_dataset(name, seed=seed, size=SIZE, **given)
    except Exception as error:  # its checks are assertions, and whatever else a wrong type comes to
        raise _refused(name, options, error) from error


def _refused(name: str, options: str, error: Exception) -> ConfigError:
    problem = f"{name} does not work with {options or 'its defaults'}: {type(error).__name__}: {error}"
    return ConfigError(
        problem, where="prompts.options", remedy='give such as {"min_terms": 2, "max_terms": 3}, as the dataset has'
    )


def _exhausted(task: str, side: str, found: int) -> ConfigError:
    problem = f"{task} has only {found} different problems that may be {side}"
    remedy = f"use --prompts.held_out {found}" if side == "held out" else "give it options with more problems"
    return ConfigError(problem, where="prompts.held_out" if side == "held out" else WHERE, remedy=remedy)
