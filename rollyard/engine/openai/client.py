"""A client of OpenAI-compatible servers: completions and chat, from whichever server is free.

Example:
    async with OpenAIClient(["http://127.0.0.1:8000/v1"], "smollm2") as client:
        piece = await client.complete("2+2=", Sampling(max_tokens=4, temperature=0.0))
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from types import TracebackType
from typing import Self, TypeVar

import httpx

from rollyard.engine.openai.answers import Piece, Served, chat_piece, completion_piece, events, models
from rollyard.engine.openai.exchange import Call, Exchange, Read, content_of, spoken
from rollyard.engine.openai.failure import Voice
from rollyard.engine.openai.limits import Limits
from rollyard.types import Sampling

CHARACTERS_A_TOKEN = 3  # of a text, to estimate its tokens
NO_LIMITS_OF_ITS_OWN = Limits()
NOTHING: Mapping[str, object] = {}

T = TypeVar("T")


class OpenAIClient:
    """Speaks to servers that serve the same model, over connections that are kept and never more than `limits` says.

    A call goes to the server with the fewest tokens under way. Connection errors, unusable answers and the statuses 408,
    409, 429 and 5xx are tried again, elsewhere if possible, with exponential backoff and full jitter; a time that a server
    names in Retry-After is kept. Other refusals are never tried again. Proxies are those of the environment, as of httpx.

    Args:
        servers: their addresses up to and with the version, such as http://127.0.0.1:8000/v1.
        model: its name there.
        key: sent as a bearer token, and never shown.
        limits: rates, tries and time limits.
        transport: instead of the network, for tests.
        random: draws the jitter.

    Raises:
        ConfigError: an address or the key cannot be used.
    """

    def __init__(
        self,
        servers: Sequence[str],
        model: str,
        key: str = "",
        limits: Limits = NO_LIMITS_OF_ITS_OWN,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
        random: Random | None = None,
    ) -> None:
        self.model, self.limits = model, limits
        self._exchange = Exchange(servers, key, limits, transport, random or Random())
        self.slots = limits.per_server * len(servers)  # requests that may be under way

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._exchange.close()

    async def models(self) -> tuple[Served, ...]:
        """What a server lists. Raises ServerError."""
        async with self._exchange.answer(Call("GET", "models"), _whole(models)) as listed:
            return listed

    async def complete(
        self,
        prompt: Sequence[int] | str,
        sampling: Sampling,
        *,
        logprobs: int | None = None,
        seed: int | None = None,
        extra: Mapping[str, object] = NOTHING,
    ) -> Piece:
        """One completion.

        Args:
            prompt: token ids, or text.
            sampling: `top_k` and `ignore_eos` are sent only where they are not the default: not every server knows them.
            logprobs: ask for logprobs, and so many of the likeliest tokens.
            seed: of the noise, where the server has one for each request.
            extra: further fields of the body.

        Raises:
            ServerError: refused, or not answered within the limits.
        """
        call = self._completion(prompt, sampling, logprobs, seed, extra)
        async with self._exchange.answer(call, _whole(completion_piece)) as piece:
            self._settle(call, piece)
            return piece

    @asynccontextmanager
    async def stream(
        self,
        prompt: Sequence[int] | str,
        sampling: Sampling,
        *,
        logprobs: int | None = None,
        seed: int | None = None,
        priority: int = 0,
        extra: Mapping[str, object] = NOTHING,
    ) -> AsyncIterator[AsyncIterator[Piece]]:
        """`complete`, piece by piece. Leaving the context closes the stream, and the server stops.

        It is tried again until there is a first piece; what breaks later raises ServerError where the pieces are read.

        Args:
            priority: lower goes first where requests wait for a place.
        """
        call = self._completion(prompt, sampling, logprobs, seed, {**extra, "stream": True}, priority)
        async with self._exchange.answer(call, _begun) as pieces:
            yield pieces

    async def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        sampling: Sampling,
        *,
        logprobs: bool = False,
        seed: int | None = None,
        extra: Mapping[str, object] = NOTHING,
    ) -> Piece:
        """The assistant's answer to a conversation; arguments and errors as of `complete`."""
        body: dict[str, object] = {"messages": list(messages), "max_completion_tokens": sampling.max_tokens}
        if logprobs:
            body["logprobs"] = True
        body |= {**self._common(sampling, seed), **extra}
        call = Call("POST", "chat/completions", body, _tokens(json.dumps(body["messages"])) + sampling.max_tokens)
        async with self._exchange.answer(call, _whole(chat_piece)) as piece:
            self._settle(call, piece)
            return piece

    def _completion(
        self,
        prompt: Sequence[int] | str,
        sampling: Sampling,
        logprobs: int | None,
        seed: int | None,
        extra: Mapping[str, object],
        priority: int = 0,
    ) -> Call:
        body: dict[str, object] = {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        body["max_tokens"] = sampling.max_tokens
        if logprobs is not None:
            body["logprobs"] = logprobs
        body |= {**self._common(sampling, seed), **extra}
        return Call("POST", "completions", body, _tokens(prompt) + sampling.max_tokens, priority)

    def _common(self, sampling: Sampling, seed: int | None) -> dict[str, object]:
        body: dict[str, object] = {"model": self.model, "temperature": sampling.temperature, "top_p": sampling.top_p}
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if sampling.stop:
            body["stop"] = list(sampling.stop)
        if sampling.ignore_eos:
            body["ignore_eos"] = True
        if seed is not None:
            body["seed"] = seed
        return body

    def _settle(self, call: Call, piece: Piece) -> None:
        """A text may have had more tokens than was estimated."""
        self._exchange.tokens.charge(max(0, piece.total_tokens - call.tokens))


def _tokens(prompt: Sequence[int] | str) -> int:
    return -(-len(prompt) // CHARACTERS_A_TOKEN) if isinstance(prompt, str) else len(prompt)


def _whole(parse: Callable[[bytes], T]) -> Read[T]:
    async def read(voice: Voice, response: httpx.Response, attempt: AsyncExitStack) -> T:
        return parse(await content_of(response))

    return read


async def _begun(voice: Voice, response: httpx.Response, attempt: AsyncExitStack) -> AsyncIterator[Piece]:
    """The pieces of a stream, once there is a first one."""
    data = events(response.aiter_bytes())
    attempt.push_async_callback(data.aclose)
    first = await anext(data, None)
    piece = None if first is None else _piece(voice, first)
    return _pieces(voice, piece, data)


async def _pieces(voice: Voice, first: Piece | None, rest: AsyncIterator[bytes]) -> AsyncIterator[Piece]:
    if first is not None:
        yield first
    with spoken(voice):
        async for data in rest:
            yield _piece(voice, data)


def _piece(voice: Voice, data: bytes) -> Piece:
    """Raises ServerError for an error that comes as an event."""
    if (error := voice.event_error(data)) is not None:
        raise error
    return completion_piece(data)
