"""What a server says when it fails, as one kind of error; and how long to wait after it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from rollyard.errors import EngineError

RETRYABLE = frozenset({408, 409, 429})  # and all from 500 on
OUT_OF_FUNDS = frozenset({"insufficient_quota", "billing_hard_limit_reached"})  # a 429 that waiting does not end
OVERFLOWS = ("context_length_exceeded", "context length", "context window", "max_model_len", "maximum model length")
MESSAGE_CHARACTERS = 500
OK = 200


class ServerError(EngineError):
    """A server could not be reached, refused, or answered something that cannot be used.

    Attributes:
        server: its address, without user, password or query.
        status: HTTP status; None when there was no answer.
        message: the server's own words, or what went wrong instead.
        retryable: may the same call work later, or on another server?
        overflow: prompt and completion do not fit the model's window.
    """

    def __init__(
        self,
        server: str,
        status: int | None,
        message: str,
        *,
        retryable: bool = False,
        overflow: bool = False,
        after_s: float | None = None,
        tries: int = 1,
    ) -> None:
        said = f"answered {status}: {message}" if status is not None else message
        super().__init__(f"server {server} {said}" + (f" (tried {tries} times)" if tries > 1 else ""))
        self.server, self.status, self.message = server, status, message
        self.retryable, self.overflow, self.after_s, self.tries = retryable, overflow, after_s, tries

    def after(self, tries: int) -> ServerError:
        """The same, once `tries` tries were made."""
        return ServerError(
            self.server,
            self.status,
            self.message,
            retryable=self.retryable,
            overflow=self.overflow,
            after_s=self.after_s,
            tries=tries,
        )


@dataclass(frozen=True, slots=True)
class Voice:
    """Puts a server's words into errors. The key never gets into one."""

    server: str
    key: str = field(repr=False)

    def failure(self, message: str, *, status: int | None = None, retryable: bool = True) -> ServerError:
        """No HTTP error: no answer, or one that cannot be used."""
        return ServerError(self.server, status, self._clean(message), retryable=retryable)

    def refusal(self, status: int, content: bytes, headers: Mapping[str, str]) -> ServerError:
        """An answer with an HTTP status that is an error."""
        try:
            body = json.loads(content)
        except (ValueError, RecursionError):
            body = content.decode(errors="replace")
        return self.error(status, body, headers)

    def error(self, status: int, body: Any, headers: Mapping[str, str]) -> ServerError:
        """An error in the server's words."""
        message, code = _words(body)
        final = code in OUT_OF_FUNDS or headers.get("x-should-retry") == "false"
        overflow = status in (400, 413, 422) and any(word in f"{code} {message}".lower() for word in OVERFLOWS)
        return ServerError(
            self.server,
            status,
            self._clean(message),
            retryable=(status in RETRYABLE or status >= 500) and not final,
            overflow=overflow,
            after_s=retry_after(headers, datetime.now(UTC)),
        )

    def event_error(self, data: bytes) -> ServerError | None:
        """The error that an event of a stream is, when it is one."""
        if b'"error"' not in data:
            return None
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return None  # unreadable, which is for others to say
        if not isinstance(body, dict) or not body.get("error"):
            return None
        code = body["error"].get("code") if isinstance(body["error"], dict) else None
        return self.error(code if isinstance(code, int) and 400 <= code < 600 else 500, body, {})

    def _clean(self, message: str) -> str:
        words = " ".join("".join(c if c.isprintable() else " " for c in message).split())
        return (words.replace(self.key, "***") if self.key else words)[:MESSAGE_CHARACTERS] or "nothing"


def retry_after(headers: Mapping[str, str], now: datetime) -> float | None:
    """Seconds to wait as the server asks for them: milliseconds, seconds or a date; None when it does not, or unreadably."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            wait_s = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if 0 <= wait_s < float("inf"):
            return wait_s
    try:
        date = parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds())


def _words(body: Any) -> tuple[str, str]:
    """Message and code, from any of the shapes in use: {"error": {...}}, {"error": text}, {"message": ...}, or text."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or json.dumps(error)
        return str(message), str(error.get("code") or error.get("type") or "")
    return str(error), ""
