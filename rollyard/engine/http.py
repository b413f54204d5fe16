"""HTTP to one engine's server: every call has a time limit, every failure one of three errors.

EngineLost: the line broke or nobody is there. ServerRefused: the server answered that it will not. EngineError: what it
answered is not in its schema.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from rollyard.errors import EngineError, EngineLost, TimeLimitExceeded

CONNECT_S = 10.0
KEEP_S = 2.0  # seconds an idle connection is kept: the server closes its own end after 5, and a request must not meet that
DONE = b"[DONE]"
MOST_BYTES = 64 << 20  # of an answer, or of one event; no real one comes near
SHOWN = 500  # characters of an answer that an error shows
JSON = TypeAdapter(dict[str, object])

# What a client of a server that checks keys needs.
GENERATE, CONTROL = 0, 1


class ServerRefused(EngineError):
    """The server answered with an error of its own. `status` is that of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _Error(BaseModel):
    """The shapes in which SGLang and vLLM say what is wrong; which one depends on the layer that noticed."""

    error: dict[str, object] | str | None = None
    message: str = ""
    detail: str = ""

    @property
    def text(self) -> str:
        if isinstance(self.error, dict):
            return str(self.error.get("message", self.error))
        return self.error or self.message or self.detail


class Client:
    """One server.

    Args:
        url: such as http://127.0.0.1:30000.
        keys: of its interface and of its control routes, empty where it asks for none.
        socket: a Unix socket where it listens, if it has no port; `url` then only names it.
    """

    def __init__(self, url: str, keys: tuple[str, str] = ("", ""), socket: str = "") -> None:
        self.url, self._keys = url.rstrip("/"), sorted(filter(None, keys), key=len, reverse=True)
        generate, control = ({"Authorization": f"Bearer {key}"} if key else {} for key in keys)
        self._headers = generate, control | {"Connection": "close"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_S)
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # calls are bounded as a whole
            transport=httpx.AsyncHTTPTransport(limits=limits, uds=socket or None, trust_env=False),
            trust_env=False,  # an engine is a neighbour: no proxy stands between
        )

    async def ping(self, path: str, *, limit_s: float) -> None:
        """Whatever it says, if it is not an error."""
        await self._call("GET", path, None, GENERATE, limit_s)

    async def get(self, path: str, *, limit_s: float) -> Mapping[str, object]:
        """The answer, an object."""
        return self._object(path, (await self._call("GET", path, None, GENERATE, limit_s))[0])

    async def post(self, path: str, body: Mapping[str, object], *, limit_s: float) -> Mapping[str, object]:
        """A control route's answer; empty where it says nothing but yes.

        Its connection is not used again: a server that fails in such a call closes it, and no other call must meet that.
        """
        content, typed = await self._call("POST", path, body, CONTROL, limit_s)
        return self._object(path, content) if typed and content not in (b"", b"null") else {}

    async def events(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[bytes]:
        """The data of each server-sent event, until the server says that it is done.

        Unbounded between two events: who reads knows whether the engine may be silent. Closing it ends the request there.
        """
        with self._failures(path):
            async with self._http.stream("POST", self.url + path, json=body, headers=self._headers[GENERATE]) as response:
                if response.status_code != httpx.codes.OK:
                    self._refuse(path, response.status_code, await self._content(path, response))
                async for data in self._data(path, response.aiter_bytes()):
                    if data == DONE:
                        return
                    yield data
        raise EngineLost(f"{self.url}{path} ended its answer half way")

    async def close(self) -> None:
        await self._http.aclose()

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None, key: int, limit_s: float
    ) -> tuple[bytes, bool]:
        """The content of an answer, and whether it is said to be JSON."""
        try:
            with self._failures(path):
                async with (
                    asyncio.timeout(limit_s),
                    self._http.stream(method, self.url + path, json=body, headers=self._headers[key]) as response,
                ):
                    content = await self._content(path, response)
        except TimeoutError:
            raise TimeLimitExceeded(f"{self.url}{path} did not answer within {limit_s:g} s") from None
        if response.status_code != httpx.codes.OK:
            self._refuse(path, response.status_code, content)
        return content, response.headers.get("content-type", "").startswith("application/json")

    async def _content(self, path: str, response: httpx.Response) -> bytes:
        content = bytearray()
        async for chunk in response.aiter_bytes():
            content += chunk
            if len(content) > MOST_BYTES:
                raise EngineError(f"{self.url}{path} answered with more than {MOST_BYTES} bytes")
        return bytes(content)

    async def _data(self, path: str, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The `data` fields of server-sent events, each one line. Split as bytes: text may hold other line ends."""
        rest = bytearray()
        async for chunk in chunks:
            if b"\n" in chunk:
                *lines, last = (rest + chunk).split(b"\n")
                rest = bytearray(last)
                for line in lines:
                    if line.startswith(b"data:"):
                        yield bytes(line[5:].strip())
            else:
                rest += chunk  # of a long line nothing is looked at twice
            if len(rest) > MOST_BYTES:
                raise EngineError(f"{self.url}{path} sent an event of more than {MOST_BYTES} bytes")

    def _refuse(self, path: str, status: int, content: bytes) -> NoReturn:
        try:
            said = _Error.model_validate_json(content).text
        except ValidationError:
            said = content.decode(errors="replace")
        raise ServerRefused(f"{self.url}{path} answered {status}: {self._shown(said)}", status)

    def _object(self, path: str, content: bytes) -> Mapping[str, object]:
        try:
            return JSON.validate_json(content)
        except ValidationError:
            said = self._shown(content.decode(errors="replace"))
            raise EngineError(f"{self.url}{path} answered with no JSON object: {said[:100]!r}") from None

    def _shown(self, said: str) -> str:
        """A server may repeat what it was sent. The keys never get into an error."""
        for key in self._keys:
            said = said.replace(key, "***")
        return said.strip()[:SHOWN]

    @contextmanager
    def _failures(self, path: str) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectTimeout:
            raise EngineLost(f"{self.url} was not reached within {CONNECT_S:g} s") from None
        except httpx.RequestError as error:  # of the line, or of an encoding that is none
            raise EngineLost(f"the line to {self.url}{path} broke: {type(error).__name__} {error}".rstrip()) from error
