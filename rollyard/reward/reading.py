"""What is read from texts: by the user's regular expressions, or the one number that is there (PURE)."""

from __future__ import annotations

import re
from typing import Final

from rollyard.errors import ConfigError

NUMBER: Final = re.compile(r"(?<![\w.])[+-]?(?:\d+(?:\.\d+)?|\.\d+)(?![\w])(?!\.\d)")


def compiled(text: str, where: str, remedy: str = "see Python's re") -> re.Pattern[str]:
    """The expression. Raises ConfigError for what is none, or is beyond what Python takes."""
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        shown = text if len(text) <= 100 else f"{text[:100]}..."
        raise ConfigError(f"{shown!r} is no regular expression: {error}", where=where, remedy=remedy) from None


def only_number(text: str) -> float | None:
    """The only number in it; one written twice is one."""
    found = {float(each) for each in NUMBER.findall(text)}
    return found.pop() if len(found) == 1 else None


def by_expression(question: str, answer: str, parse: str) -> float:
    """The group of the expression, where it matches last in the answer. It may never end. Raises ValueError: there is none."""
    found = [match[1] for match in re.finditer(parse, answer) if match[1] is not None]
    if not found:
        raise ValueError("it matches nowhere")
    return float(found[-1])
