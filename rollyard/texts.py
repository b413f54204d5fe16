"""Texts that others have written, made fit for where they go (PURE)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

from pydantic import AfterValidator, ValidationError

PLAIN = frozenset("\n\t")
SIGNS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in PLAIN} | {0x7F: 0x2421}  # of C0, such as ␛
UNKNOWN = dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)  # C1, lone surrogates
SHOWN = SIGNS | UNKNOWN
SURROGATE: Final = re.compile("[\ud800-\udfff]")
DEEPEST: Final = 64  # levels of lists and objects in what somebody gives: every reader of JSON takes as many, and some no 200
MOST_DIGITS: Final = 20  # of a count, and of nanoseconds since whenever
LONGEST: Final = 14_000  # bits of a whole number: Python reads none of more than 4,300 digits


def clean(text: str) -> str:
    """Text that UTF-8 can hold: a lone surrogate becomes its escape, as in JSON."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8")


def visible(text: str) -> str:
    """Text as a terminal may have it: a sign in the place of each control character but newline and tab.

    Example: visible("\\x1b]0;hello") == "␛]0;hello".
    """
    return text.translate(SHOWN)


def in_a_line(error: Exception) -> str:
    """What an error says, in one line. Of Pydantic's, which list all that does not fit with links to its site, the first of it.

    Example: in_a_line(error) == "begun.step: Input should be a valid integer".
    """
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        return f"{where}: {first['msg']}" if where else first["msg"]
    return " ".join(str(error).split())


def not_json(value: object) -> str:
    """What in it JSON has no words for, or would not give back as it was; empty: nothing.

    Example: not_json({"answer": [1, float("nan")]}) == "nan, which is no number".
    """
    left: list[tuple[object, int]] = [(value, 0)]
    while left:
        each, depth = left.pop()
        if isinstance(each, str | float | int | None):
            problem = _not_said(each)
        elif depth == DEEPEST:
            problem = f"more than {DEEPEST} levels of lists and objects"
        elif isinstance(each, list | tuple):
            problem = ""
            left.extend((part, depth + 1) for part in each)
        elif isinstance(each, dict):
            problem = next((why for name in each if (why := _no_name(name))), "")
            left.extend((part, depth + 1) for part in each.values())
        else:
            problem = f"a {type(each).__name__}"
        if problem:
            return problem
    return ""


def _not_said(value: str | float | int | None) -> str:
    if isinstance(value, str):
        return "half a character (a lone surrogate)" if SURROGATE.search(value) else ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value}, which is no number"
    return "a number of thousands of digits" if value is not None and value.bit_length() > LONGEST else ""


def _no_name(name: object) -> str:
    return _not_said(name) if isinstance(name, str) else f"the name {name!r:.60}, which is no text"


def once(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for `object_pairs_hook`. Raises ValueError for one that says two things by the same name."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the name {name!r} comes twice")
        found[name] = value
    return found


def counted(digits: str) -> int:
    """A whole number of a file that has counts and clocks, for `parse_int`. Raises ValueError for one that none comes to."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def host_name(name: str) -> str:
    """The same. Raises ValueError for what no machine is called: looking it up would fail, and not as an unknown name does."""
    try:
        name.encode("idna")
    except UnicodeError:
        name = "\0"
    if "\0" in name:
        raise ValueError("no name of a machine, and no address in numbers")
    return name


Host = Annotated[str, AfterValidator(host_name)]  # of an option
