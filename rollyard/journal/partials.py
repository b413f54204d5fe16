"""Tokens of members that have not finished, on their way into the journal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rollyard.journal.codec import unpack_floats, unpack_ids, unpack_spans
from rollyard.types import Partial, Segment, VersionSpan

Key = tuple[int, int]  # group, member


class Piece(NamedTuple):
    """Some tokens that follow each other. Spans cover them in order."""

    token_ids: Sequence[int]  # [tokens]
    logprobs: Sequence[float]  # [tokens]
    spans: Sequence[VersionSpan]


def unpack_piece(ids: bytes, logprobs: bytes, spans: str) -> Piece:
    """From the columns of a row."""
    return Piece(unpack_ids(ids), unpack_floats(logprobs), unpack_spans(spans))


def joined(pieces: Iterable[Piece | Segment | Partial], limit: int | None = None) -> Piece:
    """One piece of all; neighbouring spans of one version become one.

    Args:
        limit: tokens from the beginning that are kept.
    """
    ids: list[int] = []
    logprobs: list[float] = []
    spans: list[VersionSpan] = []
    for piece in pieces:
        ids.extend(piece.token_ids)
        logprobs.extend(piece.logprobs)
        for span in _spans(piece):
            if spans and spans[-1][:2] == span[:2]:
                spans[-1] = span._replace(tokens=spans[-1].tokens + span.tokens)
            else:
                spans.append(span)
    if limit is None or limit >= len(ids):
        return Piece(ids, logprobs, spans)
    return Piece(ids[:limit], logprobs[:limit], list(_first(spans, limit)))


def _spans(piece: Piece | Segment | Partial) -> Iterable[VersionSpan]:
    if isinstance(piece, Segment):
        return (VersionSpan(piece.version, piece.oldest_kv, len(piece.token_ids)),)
    return piece.spans


def _first(spans: Iterable[VersionSpan], limit: int) -> Iterable[VersionSpan]:
    """What of the spans covers the first `limit` tokens."""
    for span in spans:
        if limit <= 0:
            return
        yield span._replace(tokens=min(span.tokens, limit))
        limit -= span.tokens


@dataclass(slots=True)
class Unfinished:
    """What the journal has of a member, and what it is to get."""

    saved: int = 0  # tokens in the file
    keep: int = 0  # of those, tokens that still count
    fresh: list[Piece | Segment | Partial] = field(default_factory=list)  # after these

    @property
    def tokens(self) -> int:
        """That count."""
        return self.keep + sum(len(piece.token_ids) for piece in self.fresh)

    def cut(self, tokens: int) -> None:
        """Only the first `tokens` count from now on."""
        if tokens >= self.tokens:
            return
        if tokens <= self.keep:
            self.keep, self.fresh = tokens, []
        else:
            self.fresh = [joined(self.fresh, tokens - self.keep)]


class Unfinisheds:
    """All members that are being written, and those of which the file has rows that must go away."""

    def __init__(self) -> None:
        self._members: dict[Key, Unfinished] = {}

    def wrote(self, key: Key, piece: Segment | Partial) -> None:
        """An engine, or an earlier life, wrote this; after what it wrote before."""
        if piece.token_ids:
            member = self._members.get(key)
            if member is None:
                member = self._members[key] = Unfinished()
            member.fresh.append(piece)

    def goes_on(self, key: Key, tokens: int) -> None:
        """An engine is asked to go on after so many tokens: whatever there is beyond them was given up."""
        if (member := self._members.get(key)) is not None:
            member.cut(tokens)

    def gone(self, key: Key) -> None:
        """It has finished, or has left for good."""
        member = self._members.pop(key, None)
        if member is not None and member.saved:
            member.cut(0)
            self._members[key] = member

    def changed(self, *, fresh: bool) -> list[tuple[Key, Unfinished]]:
        """What the file does not know yet: of whom it has tokens that do not count any more and, where `fresh`, lacks some."""
        return [(key, each) for key, each in self._members.items() if each.keep < each.saved or (fresh and each.fresh)]

    def written(self, members: Iterable[tuple[Key, Unfinished]]) -> None:
        """All of these is in the file now."""
        for key, member in members:
            member.saved = member.keep = member.tokens
            member.fresh = []
            if not member.saved:
                del self._members[key]
