"""Calls of tools in what the policy wrote (PURE).

Hermes, Qwen and SmolLM write one as `<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>`, some of them several as a
list between two marks. What is not quite that stays the text that it is, all of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from rollyard.conversation import ANSWERS
from rollyard.errors import ConfigError
from rollyard.protocols.rollouts import Ask
from rollyard.texts import clean

Parser = Literal["hermes", "none"]

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
DEEPEST: Final = 64  # levels of JSON within JSON
BLANK: Final = " \t\r\n"
PROBE: Final = "a-tool-of-no-use"


@dataclass(frozen=True, slots=True)
class Call:
    """What a tool is called with: a JSON object, as text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Read:
    """What an answer says. `content`: all of its text that is no call.

    Example: read("hermes", 'Now.<tool_call>{"name": "f", "arguments": {}}</tool_call>') == Read("Now.", (Call("f", "{}"),)).
    """

    content: str
    calls: tuple[Call, ...] = ()


def read(parser: Parser, text: str) -> Read:
    """An answer, with the calls in it. One that can be read in part only is text."""
    if parser == "none" or OPEN not in text:
        return Read(text)
    try:
        pieces = list(_pieces(text))
    except (ValueError, RecursionError):
        return Read(text)
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = tuple(piece for piece in pieces if isinstance(piece, Call))
    return Read(content if content.strip() else "", calls) if calls else Read(text)


def _pieces(text: str) -> Iterator[str | Call]:
    """Texts and calls, in order; blanks between calls are no text. Raises ValueError for what is none, RecursionError."""
    begins = text.find(OPEN)
    yield text[:begins]
    while begins >= 0:
        value, ends = DECODER.raw_decode(text, _past_blanks(text, begins + len(OPEN)))
        for each in value if isinstance(value, list) else [value]:
            yield _call(each)
        ends = _past_blanks(text, ends)
        if text.startswith(CLOSE, ends):
            ends += len(CLOSE)
        elif ends < len(text):  # else a stop string has cut it off
            raise ValueError("a call goes on after its end")
        begins = text.find(OPEN, ends)
        between = text[ends : begins if begins >= 0 else len(text)]
        yield between if between.strip() else ""


def _past_blanks(text: str, at: int) -> int:
    while at < len(text) and text[at] in BLANK:
        at += 1
    return at


def _call(value: object) -> Call:
    if not (isinstance(value, dict) and isinstance(value.get("name"), str) and isinstance(value.get("arguments"), dict)):
        raise ValueError("not a name with arguments")
    if not value["name"]:
        raise ValueError("no name")
    return Call(fit(value["name"]), json.dumps(fit(value["arguments"]), ensure_ascii=False))


def _no_number(word: str) -> object:
    raise ValueError(f"{word} is no number of JSON")


DECODER: Final = json.JSONDecoder(parse_constant=_no_number)


def arguments_of(text: str) -> dict[str, Any]:
    """What a tool is called with. Raises ValueError for what is no JSON object."""
    try:
        found = json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"JSON of more than {DEEPEST} levels") from None
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    fit(found)
    return found


def fit(value: Any) -> Any:
    """JSON, as it may be put into a text. Raises ValueError for half characters, numbers without end, and too many levels."""
    _within(value, DEEPEST)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    if clean(text) != text:
        raise ValueError("half a character (a lone surrogate) in it")
    return value


def _within(value: object, levels: int) -> None:
    if levels < 0:
        raise ValueError(f"JSON of more than {DEEPEST} levels")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _within(each, levels - 1)


def unreadable(parser: Parser, ask: Ask, tools: Sequence[Mapping[str, Any]]) -> str:
    """Why no call that this policy writes would ever be read; empty: nothing is known to be in the way.

    What form it writes is told by its chat template, where that shows earlier calls.
    """
    if parser == "none":
        return ""
    if OPEN not in ask.decode(ask.encode(OPEN)):
        return f"the model's tokenizer has no text for {OPEN}, such as where that is a special token"
    call = {"id": "call00000", "type": "function", "function": {"name": PROBE, "arguments": {"of": "it"}}}
    try:
        shown = ask.decode(ask.chat_after([{"role": "user", "content": "?"}, answer_of("", [call])], tools))
    except ConfigError:
        return ""
    if PROBE not in (each.name for each in read(parser, shown).calls):
        return f"the chat template writes calls of tools in another form than {OPEN} with JSON in it"
    return ""


def answer_of(content: str, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """An answer as chat templates take it, and as what comes back is compared with it."""
    found: dict[str, Any] = {"role": ANSWERS, "content": content}
    return found | {"tool_calls": [*calls]} if calls else found
