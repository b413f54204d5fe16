"""Prompts from a JSON Lines file. Every line is looked at before anything else happens."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence
from pathlib import Path

from rollyard.errors import ConfigError
from rollyard.prompts.rows import row_of, shorten
from rollyard.prompts.source import Row
from rollyard.texts import once


def read_rows(path: Path, field: str, columns: Sequence[str] = ()) -> list[Row]:
    """Each line an object, see `rows.row_of`. Blank lines are no rows.

    Raises ConfigError naming the line and showing its content.
    """
    try:
        content = path.read_bytes().removeprefix(codecs.BOM_UTF8)  # as editors on Windows begin a file
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror}"
        raise ConfigError(problem, where="prompts.path", remedy="give a JSON Lines file") from None
    lines = enumerate(content.split(b"\n"), 1)
    rows = [_row(line, f"{path}:{number}", field, columns) for number, line in lines if line.strip()]
    if not rows:
        remedy = f'give one object a line, such as {{"{field}": "2+3="}}'
        raise ConfigError(f"{path} has no prompts in it", where="prompts.path", remedy=remedy)
    return rows


def _row(line: bytes, where: str, field: str, columns: Sequence[str]) -> Row:
    example = f'a line is such as {{"{field}": "2+3=", "answer": "5"}}'
    shown = shorten(line.decode("utf-8", "backslashreplace").strip())
    try:
        record = json.loads(line.decode("utf-8"), object_pairs_hook=once)
    except UnicodeDecodeError as error:
        raise ConfigError(f"not UTF-8 ({error.reason} at byte {error.start}): {shown}", where=where, remedy=example) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error}): {shown}", where=where, remedy=example) from None
    if not isinstance(record, dict):
        raise ConfigError(f"not an object: {shown}", where=where, remedy=example)
    return row_of(record, field, columns, where, shown, example)
