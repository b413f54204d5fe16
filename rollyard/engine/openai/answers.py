"""What servers answer: the routes' JSON as records, and server-sent events as they come."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

MOST_BYTES = 64 << 20  # of an answer, or of one event; no real one comes near
DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Piece:
    """What was written, whole or the next part of it."""

    text: str
    token_ids: tuple[int, ...] | None  # [tokens] as sampled; None where the server does not give them
    logprobs: tuple[float, ...] | None  # [tokens]; None where the server does not give them
    top: tuple[dict[str, float], ...]  # [tokens] the likeliest tokens' texts and logprobs, when asked for
    finish: str | None  # the server's word; None: more comes
    total_tokens: int  # of prompt and completion as the server counted them; 0: it did not say


@dataclass(frozen=True, slots=True)
class Served:
    """A model that a server lists."""

    name: str
    window: int | None  # tokens of prompt and completion, where the server says


class Unreadable(ValueError):
    """An answer that is not what the route promises."""


class _Record(BaseModel):
    """Unknown names are left alone: every server adds its own."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


R = TypeVar("R", bound=_Record)


class _Usage(_Record):
    total_tokens: int = 0


class _TextLogprobs(_Record):
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float] | None] | None = None


class _TextChoice(_Record):
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _TextLogprobs | None = None
    finish_reason: str | None = None


class _TextAnswer(_Record):
    choices: list[_TextChoice]
    usage: _Usage | None = None


class _Message(_Record):
    content: str | None = None


class _TokenLogprob(_Record):
    logprob: float


class _ChatLogprobs(_Record):
    content: list[_TokenLogprob] | None = None


class _ChatChoice(_Record):
    message: _Message
    logprobs: _ChatLogprobs | None = None
    finish_reason: str | None = None


class _ChatAnswer(_Record):
    choices: list[_ChatChoice]
    usage: _Usage | None = None


class _Model(_Record):
    id: str
    max_model_len: int | None = None


class _Models(_Record):
    data: list[_Model]


def completion_piece(content: bytes) -> Piece:
    """An answer of /v1/completions, or one event of its stream. Raises Unreadable."""
    answer = _parsed(_TextAnswer, content)
    total = answer.usage.total_tokens if answer.usage else 0
    if not answer.choices:  # a stream's last event, with its usage
        return Piece("", None, None, (), None, total)
    choice = answer.choices[0]
    ids = None if choice.token_ids is None else tuple(choice.token_ids)
    found = choice.logprobs.token_logprobs if choice.logprobs else None
    logprobs = None if found is None else tuple(value for value in found if value is not None)
    if found is not None and (len(logprobs or ()) < len(found) or (ids is not None and len(found) != len(ids))):
        raise Unreadable(f"{len(ids or ())} token ids come with {len(logprobs or ())} logprobs")
    top = tuple(likeliest or {} for likeliest in (choice.logprobs and choice.logprobs.top_logprobs) or ())
    return Piece(choice.text, ids, logprobs, top, choice.finish_reason, total)


def chat_piece(content: bytes) -> Piece:
    """An answer of /v1/chat/completions. Raises Unreadable."""
    answer = _parsed(_ChatAnswer, content)
    if not answer.choices:
        raise Unreadable("it has no choices")
    choice = answer.choices[0]
    found = choice.logprobs.content if choice.logprobs else None
    logprobs = None if found is None else tuple(token.logprob for token in found)
    total = answer.usage.total_tokens if answer.usage else 0
    return Piece(choice.message.content or "", None, logprobs, (), choice.finish_reason, total)


def models(content: bytes) -> tuple[Served, ...]:
    """An answer of /v1/models. Raises Unreadable."""
    return tuple(Served(model.id, model.max_model_len) for model in _parsed(_Models, content).data)


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event up to the one that says DONE. Raises Unreadable when they end without it."""
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        *lines, last = rest.split(b"\n")
        rest = bytearray(last)
        if len(rest) > MOST_BYTES:
            raise Unreadable(f"an event has more than {MOST_BYTES} bytes")
        for line in lines:
            if not line.startswith(b"data:"):  # blank, a comment, or the name of an event
                continue
            data = bytes(line.removeprefix(b"data:").strip())
            if data == DONE:
                return
            yield data
    raise Unreadable("the stream ends in the middle")


def _parsed(record: type[R], content: bytes) -> R:
    try:
        return record.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Unreadable(f"{first['msg']} at {where or 'its top'}: {content[:100].decode(errors='replace')}") from None
