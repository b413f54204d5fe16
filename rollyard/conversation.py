"""What a harness sends back of earlier answers, matched to the tokens that the policy wrote (PURE).

A chat client knows texts only: each request has the whole history, answers among it. Of a history that goes on from one that was
answered here, the answered part is taken as the tokens that it was, and only what came after is tokenized; a policy that wrote
he|llo never finds hello in its next prompt. What cannot be matched, since the harness has changed it, is tokenized from its text
like anything else that a harness says, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollyard.types import Prompt

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
Chat = Callable[[Sequence[Message], Sequence[Tool]], tuple[int, ...]]
Encode = Callable[[str], tuple[int, ...]]

ANSWERS = "assistant"  # the role of answers


@dataclass(frozen=True, slots=True)
class Rendered:
    """The tokens that a request asks to go on from.

    Example: after `he|llo` was answered to `?`, the history `?`, `hello`, `=` has the tokens of `?`, he, llo, and of `=`; then
    `matched` is 1 and `rendered` 0.
    """

    token_ids: tuple[int, ...]
    matched: int  # answers in them that are the tokens which the policy wrote
    rendered: int  # answers in them that were tokenized from their text


@dataclass(frozen=True, slots=True)
class _Answered:
    said: tuple[str, ...]  # of a conversation: its tools, and its messages, the answer last
    text: str  # of a text: all of it, the answer last
    token_ids: tuple[int, ...]  # likewise
    last: int | None  # the last of them, where the policy wrote it
    matched: int
    rendered: int


class Conversation:
    """What was said in one session.

    Args:
        prompt: what it begins with: asked as it is, it has the tokens that the run has for it.
        chat: ids of a whole conversation with these tools, up to where an answer begins.
        chat_after: ids of what comes between an answer and the next one.
        encode: ids of a text within others.
    """

    def __init__(self, prompt: Prompt, chat: Chat, chat_after: Chat, encode: Encode) -> None:
        self._prompt, self._chat, self._chat_after, self._encode = prompt, chat, chat_after, encode
        self._answered: list[_Answered] = []

    def of_messages(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Rendered:
        """A history that is to be answered. Raises what the template raises for one that it cannot render.

        What was answered with other tools was said to another prompt: it is not gone on from.
        """
        said = _said(messages, tools)
        before = max((each for each in self._answered if _begins(said, each.said)), key=lambda each: len(each.said), default=None)
        if before is None:
            own = bool(messages) and said == _said(self._prompt.messages)
            ids = tuple(self._prompt.token_ids) if own else self._chat(messages, tools)
            return Rendered(ids, 0, _answers(messages))
        rest = messages[len(before.said) - 1 :]
        after = self._chat_after(rest, tools)
        if after[:1] == (before.last,):
            after = after[1:]  # the policy has ended its answer by itself
        return Rendered((*before.token_ids, *after), before.matched, before.rendered + _answers(rest))

    def of_text(self, text: str) -> Rendered:
        """A text that is to be gone on with."""
        fits = (each for each in self._answered if each.text and text.startswith(each.text))
        before = max(fits, key=lambda each: len(each.text), default=None)
        if before is None:
            own = text == self._prompt.text
            return Rendered(tuple(self._prompt.token_ids) if own else self._encode(text), 0, 0)
        return Rendered((*before.token_ids, *self._encode(text[len(before.text) :])), before.matched, before.rendered)

    def answered_messages(
        self, messages: Sequence[Message], tools: Sequence[Tool], to: Rendered, token_ids: Sequence[int], answer: Message
    ) -> None:
        """An answer was given to a history. Of two that are the same, a harness that goes on means the later one."""
        self._keep(_said((*messages, answer), tools), "", to, token_ids)

    def answered_text(self, prompt: str, to: Rendered, token_ids: Sequence[int], text: str) -> None:
        """Likewise to a text."""
        self._keep((), prompt + text, to, token_ids)

    def _keep(self, said: tuple[str, ...], text: str, to: Rendered, token_ids: Sequence[int]) -> None:
        last = token_ids[-1] if token_ids else None
        self._answered.insert(0, _Answered(said, text, (*to.token_ids, *token_ids), last, to.matched + 1, to.rendered))


def _said(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[str, ...]:
    """JSON tells 1 from True, and does not mind in which order keys are."""
    return tuple(json.dumps(each, sort_keys=True) for each in ([*tools], *messages))


def _begins(said: Sequence[str], beginning: Sequence[str]) -> bool:
    return bool(beginning) and said[: len(beginning)] == beginning


def _answers(messages: Sequence[Message]) -> int:
    return sum(message["role"] == ANSWERS for message in messages)
