"""What comes over sockets and by HTTP, from whoever wants us harm: one clear error, or a documented answer, and never a hang."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import httpx
import pytest
from hypothesis import strategies as st

from rollyard import control
from rollyard.config import RemoteConfig
from rollyard.control import ANSWER, ORDER, Answer, Order, ask, serving
from rollyard.engine import http
from rollyard.engine.http import Client
from rollyard.engine.openai.answers import Unreadable, chat_piece, completion_piece, models
from rollyard.engine.openai.failure import ServerError, Voice
from rollyard.engine.sglang.event import Reader
from rollyard.engine.sglang.server import look
from rollyard.engine.vllm.server import _read
from rollyard.errors import ConfigError, EngineError, EngineLost, RollyardError
from rollyard.place.line import SIZE, Line
from rollyard.place.link import Link
from rollyard.reward import remote
from rollyard.reward.remote import Remote
from rollyard.types import Completion, FinishReason, Prompt
from tests.security.hostile import DEEP, fuzzed, of_bytes, of_json, words

KEY = "sk-of-this-test"


# ----------------------------------------------------------------------------------------------------- lines of ours


class Silent(Line):
    """A line that sends nothing."""

    def _post(self, head: bytes, content: bytes) -> None:
        pass


CALL = {"call": "greet", "id": 1}
ERROR = {"answer": 1, "error": "ConfigError", "retryable": False, "where": "a", "remedy": "b"}
END = {"end": True, "error": "EngineLost", "retryable": True}


@fuzzed(
    60, 300, heads=st.lists(of_json(CALL) | of_json(ERROR) | of_json(END), min_size=1, max_size=4), content=st.binary(max_size=9)
)
def test_frames(heads: list[bytes], content: bytes) -> None:
    """Whoever waits has an answer or an error of ours; whatever is no frame ends the line. No task fails unseen."""
    unseen: list[object] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, about: unseen.append(about))
        line = Silent("the far end")
        line.ready()
        calling = asyncio.create_task(line.call("x", limit_s=30))
        await asyncio.sleep(0)
        for head in heads:
            with suppress(ValueError):
                line.take(head + b"\n" + content)
        await asyncio.sleep(0)
        await line.close()
        with suppress(RollyardError):
            assert isinstance(await calling, bytes)

    asyncio.run(run())
    assert unseen == []


@fuzzed(25, 150, sent=of_bytes(SIZE.pack(len(json.dumps(CALL)) + 1) + json.dumps(CALL).encode() + b"\n"))
def test_bytes_of_a_line_that_ends(sent: bytes) -> None:
    async def run() -> None:
        left, right = socket.socketpair()
        near = Link("the far end", *await asyncio.open_connection(sock=left))
        near.ready()
        near.open()
        calling = asyncio.create_task(near.call("x", limit_s=30))
        await asyncio.sleep(0)
        right.sendall(sent[: 2**16])
        right.close()
        with pytest.raises(EngineLost):
            await calling
        await near.close()

    asyncio.run(run())


# -------------------------------------------------------------------------------------------------- a run's own socket

LIST = json.loads(ORDER.dump_json(Order("list")))
TOLD = json.loads(ANSWER.dump_json(Answer("x", (("engine-0", "up"),))))


def test_orders(tmp_path: Path) -> None:
    """Whatever is sent: the run goes on to answer others."""

    async def run() -> None:
        heard: list[Order] = []

        def answer(order: Order) -> Answer:
            heard.append(order)
            return Answer(order.do)

        async def send(content: bytes) -> bytes:
            reader, writer = await asyncio.open_unix_connection(str(tmp_path / control.NAME))
            said = b""
            with suppress(ConnectionError):
                writer.write(content)
                writer.write_eof()
                await writer.drain()
                said = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            return said

        async with serving(tmp_path, answer):
            assert (tmp_path / control.NAME).stat().st_mode & 0o777 == 0o600
            for content in (*DEEP, b"", b"\n", b"{}\n", b"\xff\n", bytes(2**20), b'{"do": 3}\n', b'{"do": "list", "more": 1}\n'):
                await send(content)
            whole = json.dumps(LIST).encode()
            assert b'"text":"list"' in await send(whole + b"\n")
            for end in range(0, len(whole), 7):
                await send(whole[:end])
        assert {order.do for order in heard} == {"list"}

    asyncio.run(run())


async def test_who_says_nothing_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "ANSWER_S", 0.1)
    async with serving(tmp_path, lambda order: Answer("yes")):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / control.NAME))
        writer.write(b'{"do": ')
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


def answered(folder: Path, *pieces: bytes, pause_s: float = 0.0) -> None:
    """Ask whoever answers with this."""
    (folder / control.NAME).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(folder / control.NAME))
        listening.listen()

        def serve() -> None:
            line, _ = listening.accept()
            with line, suppress(OSError):
                for piece in pieces:
                    line.sendall(piece)
                    time.sleep(pause_s)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            ask(folder, Order("list"))
        finally:
            thread.join()


@fuzzed(20, 150, said=of_json(TOLD))
def test_answers_of_what_is_no_run(tmp_path_factory: pytest.TempPathFactory, said: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / "asked"
    folder.mkdir(exist_ok=True)
    with suppress(ConfigError):
        answered(folder, said[: 2**17])


def test_an_answer_that_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes byte by byte, each in time."""
    monkeypatch.setattr(control, "ANSWER_S", 0.3)
    begun = time.monotonic()
    with pytest.raises(ConfigError, match="did not answer within"):
        answered(tmp_path, *[b" "] * 30, pause_s=0.05)
    assert time.monotonic() - begun < 5


# ----------------------------------------------------------------------------------------------- servers of engines


CLIENT = cache(lambda: Client("http://engine.test", (KEY, "")))  # making one reads all certificates


def client(status: int, content: bytes, times: int = 1, headers: dict[str, str] | None = None) -> Client:
    """Of a server that answers everything so."""
    made = CLIENT()

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, stream=Body(content, times), headers=headers)

    made._http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    return made


MODEL = {"model_path": "x", "is_generation": True, "weight_version": "1", "preferred_sampling_params": None}
SERVER = {"version": "0.5.6", "max_req_input_len": 100, "max_running_requests": 4, "context_length": 100}


@fuzzed(30, 200, model=of_json({**MODEL, **SERVER}), status=st.sampled_from([200, 200, 200, 401, 404, 500]), words=words)
def test_what_servers_say_of_themselves(model: bytes, status: int, words: str) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip" if words == "nan" else "identity"}
    with suppress(EngineError, ConfigError):
        asyncio.run(look(client(status, model, headers=headers), 64, 4, limit_s=5))


class Body(httpx.AsyncByteStream):
    """A body that is sent as it is."""

    def __init__(self, content: bytes, times: int = 1) -> None:
        self._content, self._times = content, times

    async def __aiter__(self):
        for _ in range(self._times):
            yield self._content


@pytest.mark.parametrize("status", [200, 500])
async def test_an_answer_without_end(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MOST_BYTES", 10_000)
    for times in (20, 20_000_000):
        endless = client(status, b"x" * 1000, times)
        with pytest.raises(EngineError, match="more than 10000 bytes"):
            await endless.get("/model_info", limit_s=30)
        with pytest.raises(EngineError, match="more than 10000 bytes"):
            [each async for each in endless.events("/generate", {})]


async def test_a_body_that_is_not_encoded_as_it_says() -> None:
    broken = client(200, b"no gzip", headers={"content-encoding": "gzip"})
    with pytest.raises(EngineLost, match="DecodingError"):
        await broken.get("/model_info", limit_s=30)


@pytest.mark.parametrize("status", [200, 401])
async def test_a_server_that_repeats_the_key(status: int) -> None:
    with pytest.raises(EngineError) as caught:
        await client(status, f"no, {KEY} is wrong".encode()).get("/model_info", limit_s=5)
    assert KEY not in str(caught.value) and "***" in str(caught.value)


EVENT = {
    "output_ids": [1, 2],
    "meta_info": {
        "completion_tokens": 2,
        "finish_reason": {"type": "stop", "message": ""},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, 1, None], [-0.5, 2, None]],
    },
}
CHUNK = {
    "choices": [{"token_ids": [1], "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": None, "stop_reason": 3}],
    "usage": {"prompt_tokens_details": {"cached_tokens": 1}},
}


@fuzzed(60, 400, event=of_json(EVENT), chunk=of_json(CHUNK))
def test_events_of_engines(event: bytes, chunk: bytes) -> None:
    with suppress(EngineError):
        Reader().read(event)
    with suppress(EngineError):
        _read(chunk)


COMPLETION = {
    "choices": [
        {
            "text": "a",
            "token_ids": [1],
            "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{"a": -0.5}]},
            "finish_reason": "stop",
        }
    ],
    "usage": {"total_tokens": 3},
}
CHAT = {"choices": [{"message": {"content": "7"}, "logprobs": {"content": [{"logprob": -0.5}]}, "finish_reason": "stop"}]}
REFUSAL = {"error": {"message": f"no, {KEY}", "type": "x", "code": 401}}


@fuzzed(60, 400, content=of_json(COMPLETION) | of_json(CHAT) | of_json(REFUSAL) | of_json({"data": [{"id": "a"}]}), after=words)
def test_answers_of_servers(content: bytes, after: str) -> None:
    for read in (completion_piece, chat_piece, models):
        with suppress(Unreadable):
            read(content)
    voice = Voice("http://a/v1", KEY)
    refusal = voice.refusal(429, content, {"retry-after": after, "retry-after-ms": after})
    assert isinstance(refusal, ServerError) and KEY not in str(refusal)
    assert refusal.after_s is None or 0 <= refusal.after_s < float("inf")
    voice.event_error(b"data: " + content)
    voice.event_error(content)


PROMPT, DONE = Prompt(0, 0, (1,), "2+3=", {}), Completion(0, 0, (1,), (-1.0,), (), FinishReason.STOP, "5")


@fuzzed(
    40,
    150,
    content=of_json({"reward": 1.0, "problem": KEY}),
    status=st.sampled_from([200, 200, 200, 302, 400, 429, 500]),
    after=words,
)
def test_verdicts_of_an_address(content: bytes, status: int, after: str) -> None:
    """A finite number, or none and why."""
    waits = remote.WAIT_S, remote.MOST_S
    remote.WAIT_S = remote.MOST_S = 0.0001  # type: ignore[misc]

    async def run() -> None:
        headers = {"Retry-After": after} if after.isascii() and after.isprintable() else {}
        config = RemoteConfig(url="http://judge.test/score", retries=1, limit_s=0.2)
        answer = httpx.MockTransport(lambda request: httpx.Response(status, stream=Body(content), headers=headers))
        judge = Remote(config, KEY, answer)
        reward = await judge.score(PROMPT, DONE)
        await judge.close()
        assert (reward.value is None) == bool(reward.problem) and KEY not in reward.problem
        assert reward.value is None or abs(reward.value) <= 3.5e38

    try:
        asyncio.run(run())
    finally:
        remote.WAIT_S, remote.MOST_S = waits  # type: ignore[misc]
