"""A stream of prompts that can be taken up at any place."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from rollyard.errors import ConfigError
from rollyard.types import Prompt

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Row:
    """What a prompt is made of: a text or chat messages, and the columns its reward is given by name."""

    prompt: str | tuple[Message, ...]
    columns: Mapping[str, object] = field(default_factory=dict)


Render = Callable[[int, Row], tuple[tuple[int, ...], str]]


class Source:
    """Prompts in a fixed order (protocols.PromptSource).

    Args:
        row: the place in the stream -> (number of the row in the data, the row). The same place gives the same row.
        render: (number of the row, the row) -> (token ids, text).
        limit: prompts in all, None for an endless stream.
        done: places that are passed over; nothing is made of them.
    """

    def __init__(
        self, row: Callable[[int], tuple[int, Row]], render: Render, limit: int | None, done: Set[int] = frozenset()
    ) -> None:
        self._row = row
        self._render = render
        self._limit = limit
        self._done = done
        self._cursor = 0

    @property
    def cursor(self) -> int:
        """How many places were passed: the id of the next prompt, unless that is done."""
        return self._cursor

    def take(self, count: int) -> tuple[tuple[Prompt, ...], bool]:
        """The next `count` prompts that are not done, and whether the stream is exhausted (fewer than asked only then).

        Raises ConfigError for a prompt without a single token.
        """
        found: list[Prompt] = []
        while len(found) < count and self._cursor != self._limit:
            place = self._cursor
            if place not in self._done:
                found.append(prompt_of(place, *self._row(place), self._render))
            self._cursor += 1
        return tuple(found), self._cursor == self._limit


def prompt_of(place: int, number: int, row: Row, render: Render) -> Prompt:
    """The prompt at a place. Raises ConfigError for one without a single token."""
    token_ids, text = render(number, row)
    if not token_ids:
        remedy = "give it a text that the tokenizer knows"
        raise ConfigError(f"the tokenizer makes no token of prompt {number}: {text!r}", where="prompts.path", remedy=remedy)
    return Prompt(place, number, token_ids, text, row.columns, () if isinstance(row.prompt, str) else row.prompt)


class Epochs:
    """Rows over and over, each epoch in an order of its own.

    Args:
        rows: the data.
        shuffle: False keeps the data's order.
        seed: of the run; the order of epoch e comes from (seed, e).
    """

    def __init__(self, rows: Sequence[tuple[int, Row]], *, shuffle: bool, seed: int) -> None:
        self._rows = rows
        self._shuffle = shuffle
        self._seed = seed
        self._epoch, self._order = -1, list(range(len(rows)))

    def __call__(self, place: int) -> tuple[int, Row]:
        epoch, position = divmod(place, len(self._rows))
        if self._shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._rows)))
            random.Random(f"epoch/{self._seed}/{epoch}").shuffle(self._order)
        return self._rows[self._order[position]]
