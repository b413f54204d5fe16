"""The line between two processes, here with both ends in one: order, errors, limits, and what happens when an end goes."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator

import pytest

from rollyard.errors import ConfigError, EngineLost, RequestRejected, RollyardError, TimeLimitExceeded, WeightSyncError
from rollyard.place import line as lines
from rollyard.place import link as links
from rollyard.place.line import SIZE, Handler
from rollyard.place.link import Link
from tests.place.lines import joined


@pytest.fixture
async def ends() -> AsyncIterator[tuple[Link, Link]]:
    near, far = await joined()
    yield near, far
    await near.close()
    await far.close()


def answer(result: bytes) -> Handler:
    async def handler(content: bytes) -> bytes:
        return result + content

    return handler


def raising(error: Exception) -> Handler:
    async def handler(content: bytes) -> bytes:
        raise error

    return handler


async def never(content: bytes) -> bytes:
    await asyncio.sleep(600)
    return b""


async def test_both_ends_may_call(ends: tuple[Link, Link]) -> None:
    near, far = ends
    far.handle("greet", answer(b"hello "))
    near.handle("greet", answer(b"welcome "))
    assert await near.call("greet", b"far\n\x00end", limit_s=5) == b"hello far\n\x00end"
    assert await far.call("greet", b"near end", limit_s=5) == b"welcome near end"
    assert await asyncio.gather(*(near.call("greet", b"%d" % n, limit_s=5) for n in range(200))) == [
        b"hello %d" % n for n in range(200)
    ]


async def test_large_contents_arrive_whole(ends: tuple[Link, Link]) -> None:
    near, far = ends
    far.handle("keep", answer(b""))
    content = os.urandom(10_000_000)
    assert await near.call("keep", content, limit_s=30) == content


async def test_what_is_too_large_is_refused_on_either_way(ends: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = ends
    far.handle("double", answer(bytes(700)))
    far.handle("keep", answer(b""))
    monkeypatch.setattr(lines, "LIMIT", 1000)
    with pytest.raises(RollyardError, match="more than 1000"):
        await near.call("keep", bytes(1000), limit_s=5)
    with pytest.raises(RollyardError, match="more than 1000"):
        await near.call("double", bytes(700), limit_s=5)  # the answer is what does not fit
    assert await near.call("keep", bytes(900), limit_s=5) == bytes(900)  # and the line goes on


@pytest.mark.parametrize(
    "frame",
    [
        SIZE.pack(2**31),
        SIZE.pack(4) + b"ab\nc",
        SIZE.pack(3) + b"[]\n",
        SIZE.pack(3) + b"{}\n",
        pytest.param(SIZE.pack(10_001) + b"[" * 10_000 + b"\n", id="deep"),
    ],
)
async def test_what_is_no_message_ends_the_line(frame: bytes) -> None:
    left, right = socket.socketpair()
    near = Link("the far end", *await asyncio.open_connection(sock=left))
    near.open()
    calling = asyncio.create_task(near.call("greet", limit_s=30))
    await asyncio.sleep(0)
    right.send(frame)
    with pytest.raises(EngineLost, match="the far end sent what is no message"):
        await calling
    await near.close()
    right.close()


async def test_calls_begin_in_their_order_and_before_a_later_answer(ends: tuple[Link, Link]) -> None:
    """As an engine sends tokens and then says that it has paused: who asked for the pause has the tokens by then."""
    near, far = ends
    heard: list[bytes] = []

    async def hear(content: bytes) -> bytes:
        heard.append(content)
        return b""

    async def pause(content: bytes) -> bytes:
        for number in range(500):
            far.tell("tokens", b"%d" % number)
        return b"paused"

    near.handle("tokens", hear)
    far.handle("pause", pause)
    for _ in range(20):
        heard.clear()
        assert await near.call("pause", limit_s=5) == b"paused"
        assert heard == [b"%d" % number for number in range(500)]


async def test_calls_that_come_before_the_handlers_wait_for_them(ends: tuple[Link, Link]) -> None:
    near, far = ends
    heard: list[bytes] = []

    async def hear(content: bytes) -> bytes:
        heard.append(content)
        return content

    for number in range(5):
        near.tell("hear", b"%d" % number)
    calling = asyncio.create_task(near.call("hear", b"5", limit_s=5))
    await asyncio.sleep(0.05)
    assert not heard and not calling.done()
    far.handle("hear", hear)
    far.ready()
    assert await calling == b"5" and heard == [b"%d" % number for number in range(6)]
    with pytest.raises(RollyardError, match="asked for dance"):
        await near.call("dance", limit_s=5)


async def test_errors_keep_their_class(ends: tuple[Link, Link]) -> None:
    near, far = ends
    far.handle("load", raising(WeightSyncError("tensor 3 is missing")))
    far.handle("generate", raising(RequestRejected("too long: \udc80")))
    far.handle("bug", raising(KeyError("vocabulary")))
    far.handle("mistake", raising(ConfigError("no GPU", where="place.device", remedy="use cpu")))
    with pytest.raises(WeightSyncError, match="tensor 3 is missing") as sync:
        await near.call("load", limit_s=5)
    assert sync.value.retryable
    with pytest.raises(RequestRejected, match="too long") as rejected:
        await near.call("generate", limit_s=5)
    assert not rejected.value.retryable
    with pytest.raises(RollyardError, match="KeyError: 'vocabulary'") as bug:
        await near.call("bug", limit_s=5)
    assert type(bug.value) is RollyardError
    with pytest.raises(ConfigError) as mistake:
        await near.call("mistake", limit_s=5)
    assert (mistake.value.problem, mistake.value.where, mistake.value.remedy) == ("no GPU", "place.device", "use cpu")


async def test_an_error_that_nobody_waits_for_fails_the_line(ends: tuple[Link, Link], caplog: pytest.LogCaptureFixture) -> None:
    near, far = ends
    near.handle("tokens", raising(ValueError("not JSON")))
    waiting = asyncio.create_task(near.call("pause", limit_s=30))
    await asyncio.sleep(0)
    far.tell("tokens")
    with pytest.raises(EngineLost, match="the far end sent tokens, which failed: ValueError: not JSON"):
        await waiting
    assert "not JSON" in await near.ended()


async def test_a_call_has_a_time_limit_and_may_be_given_up(ends: tuple[Link, Link]) -> None:
    near, far = ends
    released = asyncio.Event()

    async def slow(content: bytes) -> bytes:
        await released.wait()
        return b"late"

    far.handle("slow", slow)
    far.handle("quick", answer(b"yes"))
    with pytest.raises(TimeLimitExceeded, match=r"the far end did not answer slow within 0\.05 s"):
        await near.call("slow", limit_s=0.05)
    given_up = asyncio.create_task(near.call("slow", limit_s=30))
    await asyncio.sleep(0.02)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    released.set()  # both late answers come now, and belong to nobody
    assert await near.call("quick", limit_s=5) == b"yes"
    assert await near.call("slow", limit_s=5) == b"late"


async def test_who_waits_hears_of_the_end(ends: tuple[Link, Link]) -> None:
    near, far = ends
    far.handle("never", never)
    calls = [asyncio.create_task(near.call("never", limit_s=30)) for _ in range(3)]
    ended = asyncio.create_task(near.ended())
    await asyncio.sleep(0.02)
    await far.close()
    for call in calls:
        with pytest.raises(EngineLost, match="the far end ended"):
            await asyncio.wait_for(call, 2)
    assert await asyncio.wait_for(ended, 2) == "ended"
    with pytest.raises(EngineLost, match="ended"):
        await near.call("never", limit_s=30)
    with pytest.raises(EngineLost, match="ended"):
        near.tell("never")


async def test_an_end_can_say_which_mistake_it_ends_with(ends: tuple[Link, Link]) -> None:
    near, far = ends
    far.handle("never", never)
    waiting = asyncio.create_task(near.call("never", limit_s=30))
    await asyncio.sleep(0.02)
    far.end(ConfigError("no GPU", where="place.device", remedy="use cpu"))
    await far.close()
    for _ in range(2):  # also who asks only later
        with pytest.raises(ConfigError) as mistake:
            await waiting
        assert mistake.value.remedy == "use cpu"
        waiting = asyncio.create_task(near.call("never", limit_s=30))
    with pytest.raises(ConfigError):
        await waiting
    with pytest.raises(EngineLost, match="no GPU"):
        near.tell("never")
    assert "use cpu" in await near.ended()


async def test_closing_twice_and_with_calls_under_way(ends: tuple[Link, Link]) -> None:
    near, far = ends
    far.handle("never", never)
    near.handle("never", never)
    waiting = asyncio.create_task(near.call("never", limit_s=30))
    far.tell("never")
    await asyncio.sleep(0.02)
    await near.close()
    await near.close()
    with pytest.raises(EngineLost, match="was closed"):
        await waiting
    assert await asyncio.wait_for(far.ended(), 2) == "ended"


async def test_closing_does_not_wait_for_an_end_that_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "FLUSH_S", 0.1)
    left, right = socket.socketpair()
    near = Link("the far end", *await asyncio.open_connection(sock=left))
    near.open()
    near.tell("tokens", bytes(10_000_000))
    began = time.monotonic()
    await near.close()
    assert time.monotonic() - began < 2
    right.close()
