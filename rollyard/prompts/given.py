"""Prompts that code submits while the run goes on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import cast

from rollyard.errors import ConfigError
from rollyard.prompts.source import Render, Row, prompt_of
from rollyard.texts import not_json
from rollyard.types import Prompt

WHERE = "submit"
HIGHEST = 2**31 - 1  # of token ids, where nobody knows the vocabulary
ONE = "exactly one of text, messages and token_ids; only beside token_ids there may be a text too"


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """What is submitted: a text, a conversation, or token ids, which are used as they are; and columns for the reward.

    A text beside token ids is for people and rewards alone; without one they are given the ids decoded.
    Example: GivenPrompt("2+3=", columns={"answer": "5"}).
    """

    text: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    token_ids: Sequence[int] | None = None
    columns: Mapping[str, object] = field(default_factory=dict)


class GivenSource:
    """Implements `protocols.AwaitedSource` with prompts that are submitted.

    Args:
        render: makes token ids of a text or conversation.
        room: prompts that may wait to be taken.
        decode: token ids to text, for people.
    """

    def __init__(self, render: Render, room: int, decode: Callable[[Sequence[int]], str]) -> None:
        self._render, self._room, self._decode = render, room, decode
        self.vocabulary = 0  # token ids are lower; 0: nobody knows
        self._waiting: deque[Prompt] = deque()
        self._next = 0
        self._ended = False
        self._changed = asyncio.Event()

    def go_on(self, prompts: Sequence[Prompt], after: int) -> None:
        """Ask these of an earlier life again; the next that is submitted has the id `after`."""
        self._waiting.extend(prompts)
        self._next = max(self._next, after)
        self._change()

    @property
    def next(self) -> int:
        """The id of the next prompt that is submitted."""
        return self._next

    @property
    def cursor(self) -> int:
        return self._waiting[0].id if self._waiting else self._next

    @property
    def waiting(self) -> int:
        """Prompts that were submitted and not taken yet."""
        return len(self._waiting)

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        """At most `count` prompts, and whether no more will come."""
        found = tuple(islice(self._waiting, count))
        for _ in found:
            self._waiting.popleft()
        self._change()
        return found, self._ended and not self._waiting

    async def more(self) -> None:
        while not (self._waiting or self._ended):
            await self._changed.wait()

    @property
    def full(self) -> bool:
        """No further prompt may wait."""
        return not self._ended and len(self._waiting) >= self._room

    def make(self, given: Sequence[GivenPrompt]) -> tuple[Prompt, ...]:
        """Prompts for `put`. Many take long: any thread may do it. Raises ConfigError for one that is none, or after the end."""
        self._check_open()
        return tuple(self._prompt(id_, each) for id_, each in enumerate(given, self._next))

    def put(self, made: Sequence[Prompt]) -> tuple[int, ...]:
        """Submit prompts, all or none. Returns their ids. Raises ConfigError after the end."""
        self._check_open()
        ids = tuple(range(self._next, self._next + len(made)))
        self._waiting.extend(  # others may have been put since they were made
            prompt if prompt.id == id_ else replace(prompt, id=id_, row=id_) for id_, prompt in zip(ids, made, strict=True)
        )
        self._next += len(ids)
        self._change()
        return ids

    def end(self) -> None:
        """No more prompts will come. Harmless when said again."""
        self._ended = True
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _check_open(self) -> None:
        if self._ended:
            raise ConfigError("the prompts were ended before", where=WHERE, remedy="submit before end_of_prompts")

    def _prompt(self, id_: int, given: GivenPrompt) -> Prompt:
        check_given(id_, given)
        if given.token_ids is not None:
            ids = tuple(given.token_ids)
            if self.vocabulary and max(ids) >= self.vocabulary:
                raise _no_ids(id_, self.vocabulary - 1)
            return Prompt(id_, id_, ids, self._decode(ids) if given.text is None else given.text, given.columns)
        said = given.text if given.messages is None else tuple(map(dict, given.messages))
        assert said is not None
        return prompt_of(id_, id_, Row(said, given.columns), self._render)


def given_all(prompts: object) -> list[GivenPrompt]:
    """What was submitted at once, each as one kind. Raises ConfigError for what is no prompt, and for one by itself."""
    if isinstance(prompts, str | bytes | GivenPrompt | Mapping) or not isinstance(prompts, Iterable):
        problem = f"a {type(prompts).__name__} is no list of prompts"
        raise ConfigError(problem, where=WHERE, remedy="give a list, also of one prompt alone")
    return [_given_of(each) for each in prompts]


def _given_of(each: object) -> GivenPrompt:
    match each:
        case GivenPrompt():
            if not isinstance(each.columns, Mapping) or not all(isinstance(name, str) for name in each.columns):
                problem = f"columns of a prompt are a {type(each.columns).__name__}, or have names that are no texts"
                raise ConfigError(problem, where=WHERE, remedy='give values by name, such as {"answer": "5"}')
            return each
        case str():
            return GivenPrompt(text=each)
        case [*messages] if messages:
            return GivenPrompt(messages=cast(Sequence[Mapping[str, str]], messages))  # looked at as it is put
        case _:
            remedy = "give a text, a list of chat messages, or a GivenPrompt"
            raise ConfigError(f"a {type(each).__name__} is no prompt", where=WHERE, remedy=remedy)


def check_given(number: int, given: GivenPrompt) -> None:
    """All that shows without a tokenizer. Raises ConfigError for what is no prompt; it is named by its `number`."""
    _check_columns(given.columns, number)
    said = given.text if given.token_ids is None else given.token_ids
    if (given.messages is None) == (said is None):
        raise _refused(number, "it is not one of a text, messages and token ids", f"give {ONE}")
    if given.token_ids is not None:
        _check_ids(number, given.token_ids)
    if given.text is not None:
        _check_texts(number, [given.text], empty=given.token_ids is not None)
    if given.messages is not None:
        _check_messages(number, given.messages)


def _check_ids(number: int, ids: object) -> None:
    if not isinstance(ids, Sequence) or not ids or not all(type(token) is int and 0 <= token <= HIGHEST for token in ids):
        raise _no_ids(number, HIGHEST)


def _check_messages(number: int, messages: object) -> None:
    there = isinstance(messages, Sequence) and all(isinstance(message, Mapping) for message in messages)
    said = [message.get(key) for message in messages for key in ("role", "content")] if there else []  # type: ignore[attr-defined]
    if not said:
        raise _refused(number, "its messages are none", 'give such as [{"role": "user", "content": "2+3="}]')
    _check_texts(number, said)
    if why := not_json([dict(message) for message in messages]):  # type: ignore[attr-defined]
        raise _refused(number, f"its messages are no JSON: {why}", "give a role and a content each")


def _check_texts(number: int, said: Sequence[object], *, empty: bool = False) -> None:
    """Those that no tokenizer takes."""
    if not all(isinstance(part, str) and not not_json(part) for part in said) or not (said[-1] or empty):
        raise _refused(number, "it is empty, or has what is no text", "give texts that are not empty")


def _check_columns(columns: Mapping[str, object], number: int) -> None:
    """They are kept in the journal, and given to the reward by name."""
    if clash := {"prompt", "completion"} & set(columns):
        raise _refused(number, f"the column {clash.pop()!r} has the name of what a reward is given anyway", "rename the column")
    if why := not_json(dict(columns)):
        raise _refused(number, f"its columns are no JSON: {why}", "give texts, numbers, lists and objects of these")


def _no_ids(number: int, highest: int) -> ConfigError:
    return _refused(number, "its token ids are none", f"give whole numbers from 0 to {highest}, at least one")


def _refused(number: int, problem: str, remedy: str) -> ConfigError:
    return ConfigError(f"prompt {number}: {problem}", where=WHERE, remedy=remedy)
