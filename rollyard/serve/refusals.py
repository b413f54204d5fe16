"""What a client is told that cannot have what it asks for: one shape for all, that of OpenAI's errors."""

from __future__ import annotations

import json
import math
from http import HTTPStatus
from typing import Any

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A request is not carried out; nothing has changed.

    Args:
        status: of HTTP.
        problem: what is wrong, in one sentence.
        code: a word that programs may go by.
        param: which part of the request it is about.
        remedy: what would be right.
        after_s: seconds after which it may be asked again.
    """

    def __init__(
        self, status: int, problem: str, code: str, param: str = "", remedy: str = "", after_s: float | None = None
    ) -> None:
        super().__init__(problem)
        self.status, self.problem, self.code, self.param = status, problem, code, param
        self.remedy, self.after_s = remedy, after_s

    @property
    def content(self) -> dict[str, Any]:
        """What is sent."""
        server = "unavailable_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        message = f"{self.problem} ({self.remedy})" if self.remedy else self.problem
        return {
            "error": {
                "message": message,
                "type": KINDS.get(self.status, server),
                "param": self.param or None,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        """Besides that of the content."""
        found = {} if self.after_s is None else {"retry-after": str(max(1, math.ceil(self.after_s)))}
        if self.status == HTTPStatus.UNAUTHORIZED:
            found["www-authenticate"] = "Bearer"
        return found

    @property
    def body(self) -> bytes:
        return json.dumps(self.content).encode()
