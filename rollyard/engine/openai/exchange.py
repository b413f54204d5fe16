"""One call, from its place in the queue to a good answer: tries, waits and time limits."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from random import Random
from typing import TypeAlias, TypeVar

import httpx

from rollyard.engine.openai.answers import MOST_BYTES, Unreadable
from rollyard.engine.openai.failure import OK, ServerError, Voice
from rollyard.engine.openai.limits import Bucket, Limits
from rollyard.engine.openai.servers import Server, Servers
from rollyard.errors import ConfigError

NO_TRUST = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # knows no certificate
KEEP_S = 4.0  # seconds an idle connection is kept: less than the 5 after which common servers close it

T = TypeVar("T")
# Makes a value of a good answer. What it puts on the stack is closed when the caller is done with the value.
Read: TypeAlias = Callable[[Voice, httpx.Response, AsyncExitStack], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class Call:
    """What is asked, whichever server answers."""

    method: str
    route: str
    body: Mapping[str, object] | None = None
    tokens: int = 0  # of the prompt, and that may be written
    priority: int = 0

    @property
    def answer(self) -> str:
        """The content type of a good answer."""
        return "text/event-stream" if self.body and self.body.get("stream") else "application/json"


class Lines:
    """Connections: one for each request under way, the one used last first, so that few are kept open.

    httpx's own pool looks at each pair of its connections at each request: with some hundred it would do little else.
    """

    def __init__(self, key: str, limits: Limits, transport: httpx.AsyncBaseTransport | None) -> None:
        self._key, self._limits, self._transport = key, limits, transport
        self._free: dict[Server, list[httpx.AsyncClient]] = {}
        self._all: set[httpx.AsyncClient] = set()

    @asynccontextmanager
    async def line(self, server: Server) -> AsyncIterator[httpx.AsyncClient]:
        """A client with one connection, which may be open. One that was left in the middle of something is not used again."""
        free = self._free.setdefault(server, [])
        line = free.pop() if free else self._new(self._trust if server.url.startswith("https:") else NO_TRUST)
        try:
            yield line
        except asyncio.CancelledError:
            self._all.discard(line)
            await line.aclose()
            raise
        except BaseException:
            free.append(line)
            raise
        free.append(line)

    async def close(self) -> None:
        for line in tuple(self._all):
            await line.aclose()

    @cached_property
    def _trust(self) -> ssl.SSLContext:
        """Reading the certificates takes a while, so all connections share them."""
        return httpx.create_ssl_context()

    def _new(self, trust: ssl.SSLContext) -> httpx.AsyncClient:
        limits = self._limits
        line = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(limits.silence_s, connect=limits.connect_s),
            limits=httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEP_S),
            verify=trust,
            transport=self._transport,
        )
        self._all.add(line)
        return line


class Exchange:
    """Servers, connections to them, and the limits that hold for all calls together; arguments as of `OpenAIClient`."""

    def __init__(
        self,
        addresses: Sequence[str],
        key: str,
        limits: Limits,
        transport: httpx.AsyncBaseTransport | None,
        random: Random,
    ) -> None:
        _check(addresses, key)
        self.limits, self._random = limits, random
        self.servers = Servers([Server(address.rstrip("/"), Voice(address, key)) for address in addresses], limits)
        self._requests = Bucket(limits.requests_per_s, limits.requests_per_s * limits.burst_s)
        self.tokens = Bucket(limits.tokens_per_minute / 60, limits.tokens_per_minute / 60 * limits.burst_s)
        self._lines = Lines(key, limits, transport)

    async def close(self) -> None:
        self.servers.close()
        await self._lines.close()

    @asynccontextmanager
    async def answer(self, call: Call, read: Read[T]) -> AsyncIterator[T]:
        """What `read` makes of the first good answer, which stays open meanwhile. Raises ServerError."""
        failures: list[ServerError] = []
        deadline = asyncio.get_running_loop().time() + self.limits.total_s
        try:
            async with asyncio.timeout_at(deadline) as limit, AsyncExitStack() as kept:
                server, value = await self._tried(call, read, kept, failures, deadline)
                try:
                    yield value
                except ServerError as error:  # a stream that breaks
                    if error.retryable:
                        self.servers.failed(server, error)
                    raise
        except TimeoutError:
            if not limit.expired():
                raise
            problem = f"gave no whole answer within {self.limits.total_s:g} s"
            if failures:
                problem += f"; before that, {failures[-1]}"
            names = ", ".join(server.voice.server for server in self.servers.all)
            raise ServerError(names, None, problem, retryable=True, tries=len(failures) + 1) from None

    async def _tried(
        self, call: Call, read: Read[T], kept: AsyncExitStack, failures: list[ServerError], deadline: float
    ) -> tuple[Server, T]:
        for tries in count(1):
            await self._requests.take(1)
            await self.tokens.take(call.tokens)
            async with AsyncExitStack() as attempt:
                server = await attempt.enter_async_context(self.servers.place(call.tokens, call.priority))
                try:
                    value = await self._asked(server, call, read, attempt)
                except ServerError as error:
                    if not error.retryable:
                        self.servers.answered(server)
                        raise error.after(tries) from None
                    failures.append(error)
                    self.servers.failed(server, error)
                else:
                    self.servers.answered(server)
                    kept.push_async_exit(attempt.pop_all())
                    return server, value
            wait_s = self._backoff(tries)
            again = max(asyncio.get_running_loop().time() + wait_s, self.servers.open_at())
            if tries >= self.limits.tries or again >= deadline:
                raise failures[-1].after(tries)
            await asyncio.sleep(wait_s)
        raise AssertionError("tries are bounded")

    def _backoff(self, tries: int) -> float:
        """Seconds to wait after so many tries: exponential, with full jitter."""
        most = min(self.limits.backoff_most_s, self.limits.backoff_s * 2 ** min(tries - 1, 32))
        return self._random.uniform(0.0, most)

    async def _asked(self, server: Server, call: Call, read: Read[T], attempt: AsyncExitStack) -> T:
        """One try. Whatever goes wrong is a ServerError."""
        with spoken(server.voice):
            line = await attempt.enter_async_context(self._lines.line(server))
            stream = line.stream(call.method, f"{server.url}/{call.route}", json=call.body)
            response = await attempt.enter_async_context(stream)
            if response.status_code != OK:
                raise server.voice.refusal(response.status_code, await content_of(response), response.headers)
            kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != call.answer:
                raise Unreadable(f"{kind or 'no type'} instead of {call.answer}")
            return await read(server.voice, response, attempt)


@contextmanager
def spoken(voice: Voice) -> Iterator[None]:
    """Whatever goes wrong between here and a server becomes a ServerError."""
    try:
        yield
    except Unreadable as error:
        raise voice.failure(f"what cannot be used: {error}", status=OK) from None
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise voice.failure(f"cannot be reached: {str(error) or type(error).__name__}") from None
    except httpx.TimeoutException as error:
        raise voice.failure(f"was silent for too long: {type(error).__name__}") from None
    except httpx.RequestError as error:
        raise voice.failure(f"broke off: {type(error).__name__}: {error}") from None


async def content_of(response: httpx.Response) -> bytes:
    """The whole body. Raises Unreadable when it has no end."""
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MOST_BYTES:
            raise Unreadable(f"more than {MOST_BYTES} bytes")
    return bytes(content)


def _check(addresses: Sequence[str], key: str) -> None:
    if not addresses or len(set(addresses)) < len(addresses):
        problem = "a server is named twice" if addresses else "there is no server"
        raise ConfigError(problem, where="servers", remedy="give each address once, such as http://127.0.0.1:8000/v1")
    for address in addresses:
        try:
            url = httpx.URL(address)
        except httpx.InvalidURL as error:
            raise ConfigError(f"no address: {error}", where="servers", remedy="such as http://127.0.0.1:8000/v1") from None
        if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query:
            problem = f"an address needs http or https and a host, and no user or query: {url.scheme}://{url.host}"
            raise ConfigError(problem, where="servers", remedy="such as http://127.0.0.1:8000/v1; the key is given apart")
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ConfigError("the key has characters that no header may have", where="key", remedy="look for a line break")
