"""One record of a data set as a row: its prompt, and the columns that the reward is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollyard.errors import ConfigError
from rollyard.prompts.source import Message, Row
from rollyard.texts import not_json

SHOWN = 120  # characters of a record that an error shows
TAKEN = {"prompt", "completion"}  # names of what a reward is given anyway
EXAMPLE = 'such as [{"role": "user", "content": "2+3="}]'


def row_of(record: Mapping[str, Any], field: str, columns: Sequence[str], where: str, shown: str, example: str) -> Row:
    """The prompt that its `field` holds, a text or a list of chat messages, and columns.

    Args:
        columns: which, as NAME or NAME=FIELD; none: all other fields.
        where: the record stands, for errors.
        shown: it, in such errors.
        example: what a right one is like.

    Raises ConfigError saying what is wrong with the record.
    """
    names = ", ".join(record) or "there is none"
    if field not in record:
        remedy = f"add the field, or name another one with --prompts.field ({names})"
        raise ConfigError(f"no field {field!r}: {shown}", where=where, remedy=remedy)
    chosen = [each.partition("=")[::2] for each in columns]
    given: dict[str, object] = {name: value for name, value in record.items() if name != field} if not chosen else {}
    for name, source in chosen:
        if (source or name) not in record:
            remedy = f"name fields that there are with --prompts.columns ({names})"
            raise ConfigError(f"no field {source or name!r}: {shown}", where=where, remedy=remedy)
        given[name] = record[source or name]
    if clash := TAKEN & set(given):
        problem = f"the column {clash.pop()!r} has the name of what a reward is given anyway: {shown}"
        remedy = "rename the column, such as with --prompts.columns solution=completion,answer"
        raise ConfigError(problem, where=where, remedy=remedy)
    prompt = _prompt(record[field], where, shown, example)
    if why := not_json(prompt):
        raise ConfigError(f"{why} in the prompt: {shown}", where=where, remedy=example)
    _check_columns(given, where, shown)
    return Row(prompt, given)


def shorten(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def _check_columns(columns: Mapping[str, object], where: str, shown: str) -> None:
    """What they hold goes to other processes and to the journal, as JSON. Raises ConfigError for what cannot."""
    for name, value in columns.items():
        if why := not_json({name: value}):
            problem = f"the column {name!r} holds what JSON has no words for ({why}): {shown}"
            remedy = "leave it out: name those that the reward needs with --prompts.columns"
            raise ConfigError(problem, where=where, remedy=remedy)


def _prompt(value: Any, where: str, shown: str, example: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return tuple(value)
    problem = "an empty prompt" if value in ("", []) else "a prompt that is neither text nor a list of chat messages"
    raise ConfigError(f"{problem}: {shown}", where=where, remedy=f"{example}, or has messages {EXAMPLE}")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
