"""What is new in each event of one request's stream.

Two styles are understood without being told which: every event with all so far, or with what is new. The count of
tokens is of the whole request in both, so the last (count - tokens read) of a list are the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeVar

from pydantic import BaseModel, Field, ValidationError

from rollyard.errors import EngineError

T = TypeVar("T")
Finite = Annotated[float, Field(allow_inf_nan=False)]


class End(BaseModel):
    """Why the server ended a request: `type` is stop, length or abort."""

    type: str
    message: str = ""
    status_code: int | None = None  # with abort: of an error; none when somebody asked for it


class Meta(BaseModel):
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: End | None = None
    weight_version: str | None = None
    output_token_logprobs: list[tuple[Finite, int, str | None]] | None = None


class Event(BaseModel):
    output_ids: list[int] = []
    meta_info: Meta | None = None
    error: dict[str, object] | str | None = None


@dataclass(frozen=True, slots=True)
class News:
    """New tokens of a request, and its end."""

    token_ids: tuple[int, ...]  # [tokens]
    logprobs: tuple[float, ...]  # [tokens]
    label: str | None  # the weights the server says they are from
    meta: Meta
    end: End | None


class Reader:
    """Reads the events of one request, in order."""

    def __init__(self) -> None:
        self._read = 0  # tokens

    def read(self, data: bytes) -> News:
        """Raises EngineError when this is no event of a request, or the server says in it that the request failed."""
        try:
            event = Event.model_validate_json(data)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "the whole"
            raise EngineError(f"an event is not in the schema of /generate: {where}: {first['msg']}") from None
        meta = event.meta_info
        if event.error is not None or meta is None:
            said = event.error or "an event says nothing about its request"
            raise EngineError(str(said.get("message", said)) if isinstance(said, dict) else said)
        end = meta.finish_reason
        count = meta.completion_tokens - self._read
        logprobs = _newest(meta.output_token_logprobs or [], count)
        token_ids = _newest(event.output_ids, count)
        if end is not None and end.type == "abort" and (token_ids is None or logprobs is None):
            token_ids, logprobs, count = [], [], 0  # an abort may repeat the last token only: what lies between is not known
        if token_ids is None or logprobs is None or [token_id for _, token_id, _ in logprobs] != token_ids:
            raise EngineError(f"an event does not hold the {count} tokens that it counts, with their logprobs")
        self._read += count
        return News(tuple(token_ids), tuple(value for value, _, _ in logprobs), meta.weight_version, meta, end)


def _newest(values: list[T], count: int) -> list[T] | None:
    """The last `count`; None when there are not so many."""
    return values[len(values) - count :] if 0 <= count <= len(values) else None
