"""An event loop whose clock jumps over every wait, and servers that are functions: no time passes, no socket is opened."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from random import Random
from typing import Any, TypeVar

import httpx

from rollyard.engine.openai.client import OpenAIClient
from rollyard.engine.openai.limits import Limits

T = TypeVar("T")
A, B = "http://a/v1", "http://b/v1"


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everything waits, and nothing will ever happen"
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def virtually(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


def now() -> float:
    return asyncio.get_running_loop().time()


class Network(httpx.AsyncBaseTransport):
    """Notes when what was asked of whom, and lets `serve` answer. A function of the server's name and the body."""

    def __init__(self, serve: Callable[[str, dict[str, Any]], Awaitable[httpx.Response]]) -> None:
        self._serve = serve
        self.asked: list[tuple[float, str]] = []
        self.headers: list[httpx.Headers] = []
        self.open = self.most_open = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((now(), request.url.host))
        self.headers.append(request.headers)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            return await self._serve(request.url.host, json.loads(await request.aread() or b"null"))
        finally:
            self.open -= 1

    @property
    def times(self) -> list[float]:
        return [time for time, _ in self.asked]


class Bytes(httpx.AsyncByteStream):
    """A body in given parts. A float is a wait, an exception is raised."""

    def __init__(self, parts: Iterable[bytes | float | Exception]) -> None:
        self._parts = parts
        self.closed = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            if isinstance(part, Exception):
                raise part
            if isinstance(part, float):
                await asyncio.sleep(part)
            else:
                yield part

    async def aclose(self) -> None:
        self.closed = True


def good(text: str = "yes", **choice: object) -> httpx.Response:
    chosen = {"index": 0, "text": text, "finish_reason": "stop", **choice}
    return httpx.Response(200, json={"object": "text_completion", "choices": [chosen]})


def bad(status: int, message: str = "no", code: str | None = None, **headers: str) -> httpx.Response:
    error = {"message": message, "type": "server_error", "param": None, "code": code}
    return httpx.Response(status, json={"error": error}, headers={k.replace("_", "-"): v for k, v in headers.items()})


def script(*answers: httpx.Response | Exception) -> Network:
    """One server that answers so, one after another, and the last for ever."""
    left = list(answers)

    async def serve(host: str, body: dict[str, Any]) -> httpx.Response:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    return Network(serve)


def client(network: Network, *servers: str, key: str = "", seed: int = 0, **limits: Any) -> OpenAIClient:
    return OpenAIClient(servers or (A,), "m", key, Limits(**limits), transport=network, random=Random(seed))
