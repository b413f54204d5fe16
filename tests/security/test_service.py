"""What clients of a service may send: one answer that the document knows, whatever it is, and the service goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import save

from tests.security.hostile import fuzzed, of_bytes, of_json, words
from tests.serve.beside import Beside
from tests.serve.double import Served, batch, serving, until

LEASE, SESSION = "X-Rollyard-Lease", "X-Rollyard-Session"
PROMPTS = {"prompts": [{"text": "?", "columns": {"a": 1}}, {"token_ids": [1]}, {"messages": [{"role": "user", "content": "?"}]}]}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "max_tokens": 3, "stop": ["x"], "logprobs": True}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}],
    "tool_choice": "auto",
    "messages": [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "?"},
    ],
}
TEXT = {"model": "policy", "prompt": "?", "n": 2, "stream": True, "stream_options": {"include_usage": True}}
TENSORS = {"tensors": [{"name": "a", "shape": [2], "dtype": "torch.float32"}], "stats": {"loss": 1.0}}
KINDS: dict[str, Any] = {
    "/v1/prompts": PROMPTS | {"key": "k", "wait_s": 0.0},
    "/v1/trainer": {"trainer": "t", "take_over": True},
    "/v1/sessions": {"group": 1, "key": "k", "wait_s": 0.0},
    "/v1/sessions/none/reward": {"value": 1.0, "parts": {"a": 1.0}},
    "/v1/sessions/none/failure": {"problem": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions?": CHAT | TOOLS,
    "/v1/completions": TEXT,
    "/v1/weights/1/file": {"path": "x", "stats": {"loss": 1.0}},
    "/v1/weights/1/group": TENSORS,
}
FILE = save({"a": torch.zeros(2), "b": torch.zeros(1, 2)}, metadata={"rollyard.stats": "{}"})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, Served]]:
    """One for all examples, with a batch that is out and a member that waits."""
    with asyncio.Runner() as runner:
        closing = contextlib.AsyncExitStack()

        async def begin() -> Served:
            folder: Path = tmp_path_factory.mktemp("served")
            options: dict[str, Any] = {"serve__episodes": True, "serve__wait_s": 0.01, "serve__body_s": 5}
            found = await closing.enter_async_context(serving(folder, room=10**6, **options))
            found.run.batch.put_nowait(batch(0, 1))
            found.headers |= await found.lease() | await found.play()
            return found

        yield runner, runner.run(begin())
        runner.run(closing.aclose())


@fuzzed(60, 600, kind=st.sampled_from(sorted(KINDS)), data=st.data(), word=words)
def test_bodies(served: tuple[asyncio.Runner, Served], kind: str, data: st.DataObject, word: str) -> None:
    runner, found = served
    content = data.draw(of_json(KINDS[kind]))
    kept = word.encode("utf-8", "replace").decode("latin-1").replace("\0", "").replace("\n", "").replace("\r", "").strip()
    headers = found.headers | {"Content-Type": "application/json", "X-Other": kept.encode("latin-1")}

    async def ask() -> None:
        told = await found.http.post(kind, content=content, headers=headers)
        assert told.status_code < 500, told.text
        if told.status_code >= 400:
            assert set(json.loads(told.content)) == {"error"}
        assert (await found.http.get("/healthz")).status_code == 200

    runner.run(ask())


@fuzzed(30, 300, content=of_bytes(FILE))
def test_files_of_weights(served: tuple[asyncio.Runner, Served], content: bytes) -> None:
    runner, found = served

    async def ask() -> None:
        told = await found.http.put("/v1/weights/1", content=content, headers=found.headers)
        assert told.status_code in (200, 409, 422), told.text
        found.run.version = found.run.version._replace(step=0)  # as if it had not been published
        if found.service.desk.step is None:
            found.run.batch.put_nowait(batch(0, 1))
            await until(lambda: found.service.desk.step is not None)

    runner.run(ask())


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    with Beside(tmp_path_factory.mktemp("beside")) as found:
        yield found


HEAD = b"POST /v1/prompts HTTP/1.1\r\nHost: localhost\r\nContent-Length: 28\r\nConnection: close\r\n\r\n"
REQUEST = HEAD + b'{"prompts": [{"text": "?"}]}'


@fuzzed(40, 300, sent=of_bytes(REQUEST))
def test_bytes_of_requests(beside: Beside, sent: bytes) -> None:
    def told(content: bytes, ends: bool) -> bytes:
        with socket.create_connection(("127.0.0.1", beside.port), timeout=10) as line, contextlib.suppress(ConnectionError):
            line.sendall(content)
            if ends:
                line.shutdown(socket.SHUT_WR)
            return line.recv(2**16)
        return b""

    answer = told(sent, ends=True)
    assert not answer or answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 4")), answer
    assert told(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n", ends=False).startswith(b"HTTP/1.1 200")
