"""Texts that others have written, made fit for where they go (PURE)."""

from __future__ import annotations

from pydantic import ValidationError

PLAIN = frozenset("\n\t")
SIGNS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in PLAIN} | {0x7F: 0x2421}  # of C0, such as ␛
UNKNOWN = dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD)  # C1, lone surrogates
SHOWN = SIGNS | UNKNOWN


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
