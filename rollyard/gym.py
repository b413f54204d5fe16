"""Tasks of reasoning-gym, by name: problems from a seed, and how it judges an answer to one.

A problem goes to whoever judges as a text with all that its dataset wants to know of it. To make it again there would not
do: some datasets walk through sets of strings, whose order is another one in each process unless PYTHONHASHSEED is set.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Iterator
from decimal import Decimal
from fractions import Fraction
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


class Source(NamedTuple):
    """Where problems come from: a dataset, with options (a JSON object) and a seed."""

    dataset: str
    options: str
    seed: int


class Problem(NamedTuple):
    """A question, and its answer where there is a single one. Example: Problem(Source(...), "4 + 3 =", "7", ...)."""

    source: Source
    question: str
    answer: str | None
    entry: str  # all that the dataset knows of it, as text

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
    problem_at(Source(name, options, 0), 0)


def training(task: str, options: str, seed: int, place: int) -> Problem:
    """The problem at a place of the endless stream of a run's seed, never a held-out one. Raises ConfigError."""
    name = task.removeprefix(PREFIX)
    chunk, index = divmod(place, SIZE)
    for attempt in range(TRIES):
        problem = problem_at(Source(name, options, _seed(f"{name}/{seed}/{chunk}/{attempt}")), index)
        if not problem.held_out:
            return problem
    raise _exhausted(task, "trained on", 0)


def held_out(task: str, options: str, wanted: int) -> Iterator[Problem | None]:
    """So many different problems, the same in every run, none of them in any training stream; None for each try in vain.

    Raises ConfigError.
    """
    name = task.removeprefix(PREFIX)
    found: set[str] = set()
    for number, problem in enumerate(_all(name, options)):
        if len(found) == wanted:
            break
        if number > TRIES * wanted:
            raise _exhausted(task, "held out", len(found))
        new = problem.held_out and problem.question not in found
        if new:
            found.add(problem.question)
        yield problem if new else None


def score(source: Source, entry: str, completion: str) -> float:
    """What reasoning-gym gives the answer in a completion, 0 to 1.

    The answer is what stands in the last `<answer>` tags, as its own prompts ask for; without any it is the whole
    completion, white space around it left out.
    """
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(completion)
    given = completion.strip() if answer is None else answer
    return float(_dataset(source).score_answer(given, _unpacked(json.loads(entry))))


def problem_at(source: Source, index: int) -> Problem:
    """One of its problems. Raises ConfigError when the dataset cannot make one with these options."""
    dataset = _dataset(source)
    try:
        entry = dataset[index]
        return Problem(source, entry["question"], entry["answer"], json.dumps(_packed(entry)))
    except Exception as error:  # a dataset may raise anything
        raise _refused(source, error) from error


def _all(name: str, options: str) -> Iterator[Problem]:
    for chunk in count():
        seed = _seed(f"{name}/held out/{chunk}")
        yield from (problem_at(Source(name, options, seed), index) for index in range(SIZE))


def _seed(text: str) -> int:
    """32 bits: datasets add the index to it, so neighbouring seeds would have nearly the same problems."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


def _packed(value: Any) -> Any:
    """JSON makes lists of tuples and texts of keys; some datasets then give their own answers nothing."""
    match value:
        case Fraction() | Decimal():
            return {type(value).__name__: str(value)}
        case tuple():
            return {"tuple": [_packed(each) for each in value]}
        case list():
            return [_packed(each) for each in value]
        case dict():
            return {"dict": [[_packed(key), _packed(each)] for key, each in value.items()]}
    return value


def _unpacked(value: Any) -> Any:
    match value:
        case {"Fraction": text}:
            return Fraction(text)
        case {"Decimal": text}:
            return Decimal(text)
        case {"tuple": inner}:
            return tuple(_unpacked(each) for each in inner)
        case {"dict": pairs}:
            return {_unpacked(key): _unpacked(each) for key, each in pairs}
        case list():
            return [_unpacked(each) for each in value]
    return value


@lru_cache(maxsize=16)
def _dataset(source: Source) -> ProceduralDataset:
    from reasoning_gym.composite import DatasetSpec
    from reasoning_gym.factory import DATASETS, create_dataset

    name, options, seed = source
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
        raise _refused(source, error) from error


def _refused(source: Source, error: Exception) -> ConfigError:
    problem = f"{source.dataset} does not work with {source.options or 'its defaults'}: {type(error).__name__}: {error}"
    return ConfigError(
        problem, where="prompts.options", remedy='give such as {"min_terms": 2, "max_terms": 3}, as the dataset has'
    )


def _exhausted(task: str, side: str, found: int) -> ConfigError:
    problem = f"{task} has only {found} different problems that may be {side}"
    remedy = f"use --prompts.held_out {found}" if side == "held out" else "give it options with more problems"
    return ConfigError(problem, where="prompts.held_out" if side == "held out" else WHERE, remedy=remedy)
