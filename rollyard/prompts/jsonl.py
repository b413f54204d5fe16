"""Prompts from a JSON Lines file. Every line is looked at before anything else happens."""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import Any

from rollyard.errors import ConfigError
from rollyard.prompts.source import Message, Row

SURROGATE = re.compile("[\ud800-\udfff]")
SHOWN = 120  # characters of a broken line that an error shows


def read_rows(path: Path, field: str) -> list[Row]:
    """Each line an object whose `field` is a text or a list of chat messages; its other fields become columns.

    Blank lines are no rows. Raises ConfigError naming the line and showing its content.
    """
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # as editors on Windows begin a file
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(problem, where="prompts.path", remedy="give a JSON Lines file") from None
    rows = [_row(line, path, number, field) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if not rows:
        remedy = f'give one object a line, such as {{"{field}": "2+3="}}'
        raise ConfigError(f"{path} has no prompts in it", where="prompts.path", remedy=remedy)
    return rows


def _row(line: bytes, path: Path, number: int, field: str) -> Row:
    example = f'a line is such as {{"{field}": "2+3=", "answer": "5"}}'
    where = f"{path}:{number}"
    shown = line.decode("utf-8", "backslashreplace").strip()
    shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 ({error.reason} at byte {error.start}): {shown}", where=where, remedy=example) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error}): {shown}", where=where, remedy=example) from None
    if not isinstance(record, dict):
        raise ConfigError(f"not an object: {shown}", where=where, remedy=example)
    if field not in record:
        remedy = f"add the field, or name another one with --prompts.field ({', '.join(record) or 'the line has none'})"
        raise ConfigError(f"no field {field!r}: {shown}", where=where, remedy=remedy)
    columns = {name: value for name, value in record.items() if name != field}
    if clash := {"prompt", "completion"} & set(columns):
        problem = f"the column {clash.pop()!r} has the name of what a reward is given anyway: {shown}"
        raise ConfigError(problem, where=where, remedy="rename the column")
    prompt = _prompt(record[field], where, shown, example)
    if SURROGATE.search(prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)):
        raise ConfigError(f"half a character (a lone surrogate) in the prompt: {shown}", where=where, remedy=example)
    return Row(prompt, columns)


def _prompt(value: Any, where: str, shown: str, example: str) -> str | tuple[Message, ...]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_message(message) for message in value):
        return tuple(value)
    remedy = f'{example}, or has messages such as [{{"role": "user", "content": "2+3="}}]'
    problem = "an empty prompt" if value in ("", []) else "a prompt that is neither text nor a list of chat messages"
    raise ConfigError(f"{problem}: {shown}", where=where, remedy=remedy)


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
