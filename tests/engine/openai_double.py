"""A small OpenAI-compatible server with a real engine behind it, written from OpenAI's documented schemas.

It shares no code with the adapter, and misbehaves when told to. It may be as plain as OpenAI's own servers (`strict`), or
take and give what vLLM and SGLang add: token ids, top_k, ignore_eos.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from rollyard.errors import RequestRejected
from rollyard.model.tokenizer import Tokenizer
from rollyard.protocols.rollouts import Engine
from rollyard.types import FinishReason, Request, RequestId, Sampling, Segment
from tests.engine.embedded.serving import Reference, serving

STANDARD = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "seed",
    "logprobs", "top_logprobs", "stream", "stream_options", "echo", "user",
}  # fmt: skip
WORDS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.CONTEXT: "length", FinishReason.ABORT: "abort"}


@dataclass(frozen=True)
class Fault:
    """What happens to one request instead of a good answer. Status 0: answered well, but late, or not to its end."""

    status: int = 0
    body: str = '{"error": {"message": "told to fail", "type": "server_error", "param": null, "code": null}}'
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    cut_after: int | None = None  # events of a stream, or half of an answer, after which the connection breaks


class Double:
    """Serves an engine. `logits` of some ids after others are for the likeliest tokens, and for raw logprobs."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        logits: Callable[[Sequence[int], Sequence[int]], torch.Tensor],
        window: int = 256,
        *,
        key: str = "",
        token_ids: bool = True,
        raw: bool = False,
        strict: bool = False,
        says_window: bool = True,
        logprobs: bool = True,
    ) -> None:
        self._engine, self._tokenizer, self._logits, self._window, self._key = engine, tokenizer, logits, window, key
        self._token_ids, self._raw, self._strict, self._says_window = token_ids, raw, strict, says_window
        self._logprobs = logprobs
        self._names = count()
        self._news: dict[RequestId, asyncio.Queue[Segment]] = {}
        self.faults: deque[Fault] = deque()  # of the next requests, one each
        self.bodies: list[dict[str, Any]] = []
        self.stopped: asyncio.Queue[RequestId] = asyncio.Queue()  # requests whose client went away
        self.connections: set[object] = set()  # ever opened
        self.most_open = 0
        self.address = ""
        self._runner = web.AppRunner(self._app(), handler_cancellation=True, access_log=None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Double]:
        pump = asyncio.create_task(self._pump())
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, backlog=1024).start()
        self.address = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await self._runner.cleanup()
            pump.cancel()
            await asyncio.wait((pump,))

    @property
    def open(self) -> int:
        """Connections now."""
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _pump(self) -> None:
        async for segments in self._engine.segments():
            for segment in segments:
                if segment.request in self._news:
                    self._news[segment.request].put_nowait(segment)

    def _refused(self, request: web.Request) -> web.Response | None:
        self.connections.add(request.protocol)
        self.most_open = max(self.most_open, self.open)
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            given = request.headers.get("Authorization", "").removeprefix("Bearer ")
            return _error(401, f"Incorrect API key provided: {given}.", "invalid_api_key")
        return None

    async def _models(self, request: web.Request) -> web.StreamResponse:
        model: dict[str, object] = {"id": "tiny", "object": "model", "created": 0, "owned_by": "tests"}
        if self._says_window:
            model["max_model_len"] = self._window
        return self._refused(request) or web.json_response({"object": "list", "data": [model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refused(request)) is not None:
            return refused
        body = await request.json()
        prompt = body["prompt"]
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        return await self._answer(request, body, ids, body.get("max_tokens", 16), chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if (refused := self._refused(request)) is not None:
            return refused
        body = await request.json()
        ids = self._tokenizer.chat(body["messages"])
        most = body.get("max_completion_tokens", body.get("max_tokens", self._window - len(ids)))
        return await self._answer(request, body, ids, most, chat=True)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], ids: tuple[int, ...], most: int, *, chat: bool
    ) -> web.StreamResponse:
        self.bodies.append(body)
        fault = self.faults.popleft() if self.faults else Fault()
        await asyncio.sleep(fault.delay_s)
        if fault.status:
            return web.Response(status=fault.status, text=fault.body, content_type=fault.kind, headers=fault.headers)
        if body["model"] != "tiny":
            return _error(404, f"The model {body['model']!r} does not exist.", "model_not_found")
        if self._strict and (unknown := set(body) - STANDARD):
            return _error(400, f"Unrecognized request arguments supplied: {', '.join(sorted(unknown))}")
        if not self._logprobs and body.get("logprobs") is not None:
            return _error(400, "This model gives no logprobs.")
        if len(ids) + most > self._window:
            said = f"This model's maximum context length is {self._window} tokens. However, you requested {len(ids) + most}"
            return _error(400, f"{said} tokens ({len(ids)} in the prompt, {most} in the completion).", "context_length_exceeded")
        name = RequestId(next(self._names), 0)
        self._news[name] = asyncio.Queue()
        top_k = max(0, body.get("top_k", 0))
        stop = body.get("stop") or ()
        sampling = Sampling(
            most,
            body.get("temperature", 1.0),
            body.get("top_p", 1.0),
            top_k,
            (stop,) if isinstance(stop, str) else tuple(stop),
            body.get("ignore_eos", False),
        )
        try:
            self._engine.generate([Request(name, ids, sampling, body.get("seed", 0))])
            if body.get("stream"):
                return await self._stream(request, body, name, sampling, ids, fault)
            return await self._whole(request, body, name, sampling, ids, fault, chat=chat)
        except RequestRejected as error:
            return _error(400, str(error))
        except (asyncio.CancelledError, ConnectionResetError):
            await self._engine.abort([name])
            self.stopped.put_nowait(name)
            raise
        finally:
            del self._news[name]

    async def _whole(
        self,
        request: web.Request,
        body: dict[str, Any],
        name: RequestId,
        sampling: Sampling,
        prompt: tuple[int, ...],
        fault: Fault,
        *,
        chat: bool,
    ) -> web.StreamResponse:
        ids: list[int] = []
        logprobs: list[float] = []
        finish = None
        while finish is None:
            segment = await self._news[name].get()
            ids += segment.token_ids
            logprobs += segment.logprobs
            finish = segment.finish
        text = self._tokenizer.completion_text(ids, sampling.stop, finish)
        if chat:
            content = [{"token": "", "bytes": None, "logprob": value, "top_logprobs": []} for value in logprobs]
            choice: dict[str, Any] = {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": {"content": content} if body.get("logprobs") else None,
                "finish_reason": WORDS[finish],
            }
        else:
            choice = self._choice(body, text, ids, logprobs, prompt, WORDS[finish])
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        kind = "chat.completion" if chat else "text_completion"
        answer = {"id": "x", "object": kind, "created": 0, "model": "tiny", "choices": [choice], "usage": usage}
        if fault.cut_after is None:
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "4096"})
        await response.prepare(request)
        await response.write(json.dumps(answer).encode()[:20])
        _cut(request)
        return response

    async def _stream(
        self,
        request: web.Request,
        body: dict[str, Any],
        name: RequestId,
        sampling: Sampling,
        prompt: tuple[int, ...],
        fault: Fault,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        ids: list[int] = []
        sent, finish = 0, None
        for number in count():
            if number == fault.cut_after:
                _cut(request)
                raise ConnectionResetError
            segment = await self._news[name].get()
            finish = segment.finish
            at = (*prompt, *ids)
            ids += segment.token_ids
            text = self._tokenizer.completion_text(ids, sampling.stop, finish or FinishReason.LENGTH)
            if sampling.stop and finish is None:
                text = text[:sent]  # a stop string may have begun
            word = None if finish is None else WORDS[finish]
            choice = self._choice(body, text[sent:], segment.token_ids, segment.logprobs, at, word)
            sent = max(sent, len(text))
            chunk = {"id": "x", "object": "text_completion", "created": 0, "model": "tiny", "choices": [choice]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            if finish is not None:
                break
        await response.write(b"data: [DONE]\n\n")
        return response

    def _choice(
        self,
        body: dict[str, Any],
        text: str,
        ids: Sequence[int],
        logprobs: Sequence[float],
        before: tuple[int, ...],
        finish: str | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        if body.get("logprobs") is not None:
            tops, values = [], []
            temperature = 1.0 if self._raw or not body["temperature"] else body["temperature"]
            rows = self._logits(before, ids) / temperature if ids else ()
            for token_id, logprob, row in zip(ids, logprobs, rows, strict=True):
                spread = torch.log_softmax(row, dim=-1)
                best = spread.topk(max(1, body["logprobs"]))
                values.append(float(spread[token_id]) if self._raw else logprob)
                tops.append({f"token {i}": float(v) for v, i in zip(best.values, best.indices.tolist(), strict=True)})
            texts = [f"token {token_id}" for token_id in ids]
            choice["logprobs"] = {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": [0] * len(ids)}
        if self._token_ids and body.get("return_token_ids"):
            choice["token_ids"] = list(ids)
        return choice


@asynccontextmanager
async def double(folder: Path, *, slots: int = 8, window: int = 256, **offers: Any) -> AsyncIterator[Double]:
    """A running one, with an embedded engine for this folder behind it."""
    async with serving(folder, window=window, slots=slots, kernels="plain") as engine:
        server = Double(engine, Tokenizer(folder), Reference(folder).logits, window, **offers)
        async with server.running():
            yield server


def _cut(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()


def _error(status: int, message: str, code: str | None = None) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return web.json_response({"error": error}, status=status)
