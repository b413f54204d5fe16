"""An answer while it is written, as far as it can be told: what whatever comes cannot change."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from rollyard.protocols.rollouts import Hearing

REPLACED = "\N{REPLACEMENT CHARACTER}"  # in the text of a token that is a part of a character


class Streamed:
    """The text of one answer, token by token.

    Args:
        decode: text of ids.
        marks: texts with which something begins that is no text of the answer, or may be none: ends of it, calls.
        blank: blanks alone may come to nothing.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], marks: Sequence[str], *, blank: bool) -> None:
        self._decode, self._marks, self._blank = decode, [mark for mark in marks if mark], blank
        self._ids: list[int] = []
        self._text = ""
        self._from = self._read = 0  # text has been made of the tokens before `_read`; of those from `_from` on, last

    def hear(self, after: int, token_ids: Sequence[int]) -> None:
        """See `protocols.Hearing`."""
        if after < len(self._ids):
            del self._ids[after:]
            self._text, self._from, self._read = "", 0, 0
        self._ids += token_ids
        before, now = self._decode(self._ids[self._from : self._read]), self._decode(self._ids[self._from :])
        if not now.endswith(REPLACED):  # else the rest of a character is to come
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)

    @property
    def sure(self) -> str:
        """As much of the text as is sure, unless tokens are taken back.

        Example: of `hello </` with the mark `</end>` it is `hello `.
        """
        text = self._text
        ends = min((at for at in map(text.find, self._marks) if at >= 0), default=-1)
        if ends < 0:
            begun = (length for mark in self._marks for length in range(1, len(mark)) if text.endswith(mark[:length]))
            ends = len(text) - max(begun, default=0)
        return "" if self._blank and not text[:ends].strip() else text[:ends]


class Progress:
    """Of the answers to one question, one after the other."""

    def __init__(self) -> None:
        self.answers: list[Streamed] = []
        self.changed = asyncio.Event()  # when more is there; then it is another one

    def begin(self, answer: Streamed) -> Hearing:
        """One is going to be written; what hears of it."""
        self.answers.append(answer)

        def hearing(after: int, token_ids: Sequence[int]) -> None:
            answer.hear(after, token_ids)
            self.changed.set()
            self.changed = asyncio.Event()

        return hearing
