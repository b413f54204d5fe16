"""Streams: how events are read, when they are tried again, and that they are closed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import httpx
import pytest

from rollyard.engine.openai.answers import Piece
from rollyard.engine.openai.client import OpenAIClient
from rollyard.engine.openai.failure import ServerError
from rollyard.types import Sampling
from tests.engine.openai.virtual import A, B, Bytes, Network, bad, client, now, virtually

FOUR = Sampling(4)
DONE = b"data: [DONE]\n\n"


def event(text: str, finish: str | None = None, **choice: object) -> bytes:
    chosen = {"index": 0, "text": text, "finish_reason": finish, **choice}
    return f"data: {json.dumps({'choices': [chosen]}, ensure_ascii=False)}\n\n".encode()


def streams(*bodies: Iterable[bytes | float | Exception] | httpx.Response) -> tuple[Network, list[Bytes]]:
    """A server that answers with these streams, one after another."""
    opened: list[Bytes] = []
    left = list(bodies)

    async def serve(host: str, body: dict[str, Any]) -> httpx.Response:
        assert body["stream"] is True
        parts = left.pop(0)
        if isinstance(parts, httpx.Response):
            return parts
        opened.append(Bytes(parts))
        return httpx.Response(200, headers={"content-type": "text/event-stream; charset=utf-8"}, stream=opened[-1])

    return Network(serve), opened


async def pieces(asking: OpenAIClient) -> list[Piece]:
    async with asking.stream("a", FOUR) as coming:
        return [piece async for piece in coming]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_read_however_they_are_cut(size: int, end: bytes) -> None:
    usage = b'data: {"choices": [], "usage": {"total_tokens": 9}}\n\n'
    whole = (
        b": hello\n\nevent: x\nid: 1\n" + event("zwölf\u2028\x85") + event("", "length") + usage + DONE + b"data: x\n"
    ).replace(b"\n", end)

    async def work() -> None:
        network, opened = streams([whole[at : at + size] for at in range(0, len(whole), size)])
        async with client(network) as asking:
            read = await pieces(asking)
        assert [piece.text for piece in read] == ["zwölf\u2028\x85", "", ""]
        assert [piece.finish for piece in read] == [None, "length", None]
        assert read[2].total_tokens == 9
        assert opened[0].closed

    virtually(work())


def test_token_ids_and_logprobs_of_each_event() -> None:
    first = event("ab", token_ids=[5, 6], logprobs={"token_logprobs": [-0.5, -1], "top_logprobs": [{"a": -0.5}, None]})

    async def work() -> None:
        network, _ = streams([first, event("", "stop", token_ids=[], logprobs=None), DONE])
        async with client(network) as asking:
            read = await pieces(asking)
        assert (read[0].token_ids, read[0].logprobs, read[0].top) == ((5, 6), (-0.5, -1.0), ({"a": -0.5}, {}))
        assert (read[1].token_ids, read[1].logprobs) == ((), None)

    virtually(work())


@pytest.mark.parametrize(
    "begin",
    [
        [httpx.ReadError("reset")],
        [b": still here\n\n", httpx.RemoteProtocolError("cut")],
        [],
        [b'data: {"error": {"message": "overloaded", "code": 503}}\n\n', DONE],
        [b'data: {"error": "overloaded"}\n\n', DONE],
        [b"data: nonsense\n\n"],
        bad(500),
        httpx.Response(200, json={"choices": []}),
    ],
)
def test_a_stream_is_tried_again_until_its_first_piece(begin: list[bytes | float | Exception] | httpx.Response) -> None:
    async def work() -> None:
        network, opened = streams(begin, [event("x", "stop"), DONE])
        async with client(network) as asking:
            assert [piece.text for piece in await pieces(asking)] == ["x"]
        assert len(network.asked) == 2
        assert all(body.closed for body in opened)

    virtually(work())


def test_an_error_event_that_is_the_requests_own_fault_is_not_tried_again() -> None:
    async def work() -> None:
        network, _ = streams([b'data: {"error": {"message": "too long", "code": 400}}\n\n'])
        async with client(network) as asking:
            with pytest.raises(ServerError, match="answered 400: too long"):
                await pieces(asking)

    virtually(work())


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ([httpx.ReadError("reset")], "broke off: ReadError: reset"),
        ([], "the stream ends in the middle"),
        ([b'data: {"error": {"message": "engine died"}}\n\n'], "answered 500: engine died"),
        ([b"data: nonsense\n\n", DONE], "cannot be used"),
        ([1e9], "gave no whole answer within 600 s"),
    ],
)
def test_what_breaks_after_the_first_piece_is_said_and_not_repeated(end: list[bytes | float | Exception], said: str) -> None:
    async def work() -> None:
        network, opened = streams([event("x"), *end])
        read = []
        async with client(network, total_s=600.0) as asking:
            with pytest.raises(ServerError, match=said) as caught:
                async with asking.stream("a", FOUR) as coming:
                    async for piece in coming:
                        read.append(piece.text)
            assert asking._exchange.servers.all[0].in_flight == 0
        assert read == ["x"]
        assert len(network.asked) == 1
        assert caught.value.retryable
        assert opened[0].closed

    virtually(work())


def test_a_server_whose_stream_broke_is_avoided() -> None:
    async def serve(host: str, body: dict[str, Any]) -> httpx.Response:
        parts = [event("x"), httpx.ReadError("reset")] if host == "a" else [event("x", "stop"), DONE]
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Bytes(parts))

    async def work() -> None:
        network = Network(serve)
        async with client(network, A, B, aside_s=30.0) as asking:
            with pytest.raises(ServerError):
                await pieces(asking)
            for _ in range(10):
                await pieces(asking)
        assert [host for _, host in network.asked] == ["a"] + 10 * ["b"]

    virtually(work())


async def _leave(asking: OpenAIClient) -> None:
    async with asking.stream("a", FOUR) as coming:
        async for _ in coming:
            return


async def _cancel(asking: OpenAIClient) -> None:
    task = asyncio.create_task(pieces(asking))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _raise(asking: OpenAIClient) -> None:
    with pytest.raises(TimeoutError, match="the caller's own"):
        async with asking.stream("a", FOUR) as coming:
            await anext(coming)
            raise TimeoutError("the caller's own")


@pytest.mark.parametrize("leave", [_leave, _cancel, _raise])
def test_a_stream_that_nobody_reads_any_more_is_closed_at_once(leave: Callable[[OpenAIClient], Any]) -> None:
    async def work() -> None:
        network, opened = streams([event("x"), 1e5, event("y", "stop"), DONE])
        async with client(network, total_s=1e6) as asking:
            await leave(asking)
            assert opened[0].closed
            assert now() <= 1
            assert asking._exchange.servers.all[0].in_flight == 0

    virtually(work())
