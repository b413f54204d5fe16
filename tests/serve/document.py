"""Answers held against the OpenAPI document that the service gives of itself."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import httpx
import schemathesis

JSON, NDJSON, EVENTS = "application/json", "application/x-ndjson", "text/event-stream"
Route = tuple[str, str]  # method and path, as the document has them


class Document:
    """What is there, and what of it was answered well."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        told = copy.deepcopy(dict(document))
        self.routes: dict[Route, dict[str, Any]] = {
            (method.upper(), path): operation for path, of_path in told["paths"].items() for method, operation in of_path.items()
        }
        self.answered: set[tuple[Route, str]] = set()  # with 2xx, by the kind of what came
        for operation in self.routes.values():
            for answer in operation["responses"].values():  # a line is looked at like an answer of its own
                if NDJSON in (kinds := answer.get("content", {})):
                    kinds[JSON] = kinds[NDJSON]
        self._schema = schemathesis.openapi.from_dict(told)

    def hold(self, response: httpx.Response, content: bytes) -> None:
        """Raises AssertionError, or schemathesis' failure."""
        path = response.request.url.path
        found = [key for key in self.routes if key[0] == response.request.method and _fits(key[1], path)]
        if not found:
            return
        route = min(found, key=lambda key: key[1].count("{"))
        told = self.routes[route]["responses"]
        assert str(response.status_code) in told, f"{route} may not answer {response.status_code}: {content[:300]!r}"
        kinds, kind = told[str(response.status_code)].get("content", {}), response.headers.get("content-type", "").split(";")[0]
        assert kind in kinds if content else not kinds or response.status_code == 204, (route, kind, kinds)
        for piece in _pieces(kind, content, NDJSON in kinds):
            request = httpx.Request(route[0], response.request.url)
            made = httpx.Response(response.status_code, headers={"content-type": JSON}, content=piece, request=request)
            made.elapsed = timedelta()
            self._schema[route[1]][route[0]].validate_response(made)
        if response.is_success:
            self.answered.add((route, kind))


def _fits(template: str, path: str) -> bool:
    return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", template), path) is not None


def _pieces(kind: str, content: bytes, of_lines: bool) -> Iterator[bytes]:
    """Of an answer, what has a schema: itself, its lines, or the data of its events."""
    if kind == JSON:
        yield content
    elif kind == NDJSON:
        yield from content.splitlines()
    elif kind == EVENTS:
        data = re.findall(rb"^data: (.*)$", content, re.MULTILINE)
        assert all(each == b"[DONE]" or json.loads(each) for each in data)
        yield from data if of_lines else ()
