"""A small server that speaks SGLang's HTTP interface, with the embedded engine behind it: the double for tests.

Written from SGLang's own schemas and handlers, of two releases that differ: 0.5.23 (srt/entrypoints/http_server.py,
srt/managers/io_struct.py, tokenizer_manager.py, tokenizer_control_mixin.py, api/v1/api_types.py) and 0.5.6 (the same
files, older layout), with docs/advanced_features/sglang_for_rl.md. It shares no code with `rollyard.engine.sglang`.
Tokens and logprobs are real; so is the time they take. What the real server dies of, this one dies of too. One thing it
does better: with top_p or top_k its logprobs are those of the kept tokens, and SGLang's are of all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from rollyard.config import EngineConfig
from rollyard.engine.embedded.engine import EmbeddedEngine
from rollyard.events import Rollover, WakePart
from rollyard.model.folder import load
from rollyard.model.tokenizer import Tokenizer
from rollyard.types import Manifest, Request, RequestId, WeightVersion
from tests.engine import sglang_parts as parts
from tests.engine.sglang_parts import CONTROL, FAULT, NEW, OLD, Died, Fault, FromDisk, Live, SlowDevice


@dataclass
class Double:
    """One server. Its options are those of the command line that matter here."""

    folder: Path
    version: str = NEW
    incremental: bool = False  # --incremental-streaming-output, --stream-output
    deterministic: bool = False
    memory_saver: bool = False
    weights_backup: bool = False
    preferred: str | None = None
    context: int = 256
    slots: int = 8
    interval: int = 3  # tokens of an event
    step_s: float = 0.0  # seconds a step of the engine takes besides
    key: str = ""
    admin_key: str = ""
    faults: dict[str, Fault] = field(default_factory=dict)
    closed: bool = False
    asked: list[tuple[str, Any]] = field(default_factory=list)  # paths and bodies, as they came

    # ------------------------------------------------------------------------------------- life

    async def start(self, port: int = 0) -> None:
        await self._boot()
        app = web.Application(middlewares=[self._guard])
        for path, handler in {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/flush_cache": self._flush_cache,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._relabel,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }.items():
            app.router.add_post(path, handler)
        app.router.add_get("/flush_cache", self._flush_cache)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._model_info)
        for path in ("/server_info", "/get_server_info"):
            app.router.add_get(path, self._server_info)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def _boot(self) -> None:
        """What a fresh process has: the weights of the command line, nothing running."""
        self.device = SlowDevice(0.0)
        policy = load(self.folder, torch.float32, torch.device("cpu"))
        config = EngineConfig(slots=self.slots, page_tokens=4)
        self.engine = EmbeddedEngine("behind", policy, Tokenizer(self.folder), self.device, FromDisk(), config, self.context)
        self._eos = policy.architecture.eos_ids
        await self.engine.start()
        self.label, self.labels = "default", ["default"]  # by load
        self.path, self.loads = str(self.folder), 0
        await self._switch("")
        self.device.step_s = self.step_s
        self._names = count()
        self.live: dict[str, Live] = {}
        self._by_id: dict[RequestId, Live] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._open = asyncio.Event()
        self._open.set()
        self.paused = ""  # the mode
        self._aborts: list[RequestId] = []  # not heard while requests stand still
        self.released: set[str] = set()
        self.died = ""
        self._lines: set[asyncio.Transport] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._start(self._collect())

    async def restart(self) -> None:
        """The process ends and another takes its place, at the same address."""
        self._break_lines()
        await self._shut_engine()
        await self._boot()

    async def close(self) -> None:
        if not self.closed:
            self.closed = True
            await self._shut_engine()
            await self._runner.cleanup()

    async def _shut_engine(self) -> None:
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        self.device.step_s = 0.0
        await self.engine.close()
        self.device.close()

    async def idle(self, limit_s: float) -> None:
        """Wait until nothing runs. Raises TimeoutError."""
        async with asyncio.timeout(limit_s):
            await self._idle.wait()

    async def die(self) -> None:
        """Nobody listens any more."""
        self._break_lines()
        await self.close()

    def _break_lines(self) -> None:
        for line in self._lines:
            line.abort()

    # ------------------------------------------------------------------------------------- every route

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        assert request.transport is not None
        self._lines.add(request.transport)
        wanted = (self.admin_key or self.key) if request.path in CONTROL else self.key
        if wanted and request.headers.get("Authorization") != f"Bearer {wanted}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        fault = self._fault(request.path)
        await asyncio.sleep(fault.late_s)
        if fault.hang:
            await asyncio.Event().wait()
        if fault.status or fault.body:
            status = fault.status or 200
            said = {"object": "error", "message": "told to fail", "type": str(status), "param": None, "code": status}
            text = fault.body or json.dumps(said)
            return web.Response(text=text, status=status, content_type="application/json")
        FAULT.set(fault)
        try:
            if self.died:
                raise Died
            return await handler(request)
        except Died:
            self._break_lines()
            return await asyncio.Event().wait() or web.Response()

    def _fault(self, path: str) -> Fault:
        fault = self.faults.get(path, Fault())
        if fault.times is not None:
            fault.times -= 1
            if fault.times < 0:
                return Fault()
        return fault

    async def _body(self, request: web.Request) -> dict[str, Any]:
        body = await request.json()
        self.asked.append((request.path, body))
        return dict(body)

    def _end(self, cause: str) -> Died:
        self.died = cause
        return Died(cause)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # ------------------------------------------------------------------------------------- generating

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request)
        problem, shape = self._why_not(body)
        if problem:
            said = problem if shape == "contract" and self.version == NEW else {"message": problem}
            return web.json_response({"error": said}, status=400)
        await self._open.wait()
        live = self._admit(body)
        try:
            if body.get("stream"):
                return await self._stream(request, live)
            while live.finish is None:
                await live.changed.wait()
                live.changed.clear()
            return web.json_response(self._event(live, 0, len(live.ids), live.finish, ""))
        finally:  # also when the client is gone
            if live.finish is None and not self.died:
                self._order_abort(live.rid)

    def _why_not(self, body: dict[str, Any]) -> tuple[str, str]:
        ids, parameters = body.get("input_ids"), body.get("sampling_params", {})
        if malformed := parts.why_malformed(ids, parameters):
            return malformed, "contract"
        top_k, temperature = parameters.get("top_k", -1), parameters.get("temperature", 1.0)
        length, most = len(ids), parameters.get("max_new_tokens", 128)
        rules = (
            (top_k != -1 and top_k < 1, f"top_k must be -1 (disable) or at least 1, got {top_k}"),
            (temperature < 0, "temperature must be non-negative"),
            (body.get("rid") in self.live, f"duplicate rid {body.get('rid')}"),
            (length >= self.context - 6, f"the input of {length} tokens is too long"),
            (length + most > self.context, f"{length} + {most} tokens exceed the context of {self.context}"),
            (not set(parameters.get("stop_token_ids") or ()) <= self._eos, "this double ends at the model's own tokens only"),
            (parameters.get("n", 1) != 1 or "stop" in parameters, "this double has no n and no stop strings"),
            ("sampling_seed" in parameters and parameters["sampling_seed"] is None and self.version == OLD, "seed is null"),
        )
        return next(((text, "value") for broken, text in rules if broken), ("", ""))

    def _admit(self, body: dict[str, Any]) -> Live:
        ids, parameters = body["input_ids"], body.get("sampling_params", {})
        name = RequestId(next(self._names), 0)
        live = Live(body.get("rid") or f"{name.group:032x}", len(ids))
        most = min(parameters.get("max_new_tokens", 128), self.context - 1 - len(ids) - 1)
        seed = parameters.get("sampling_seed", 42) if self.deterministic else name.group + 1_000_003
        # As one token and its continuation: the engine behind then draws with the noise of the place in the sequence.
        self.engine.generate([Request(name, tuple(ids[:1]), parts.sampling_of(parameters, most), seed, tuple(ids[1:]))])
        self.live[live.rid] = self._by_id[name] = live
        self._idle.clear()
        return live

    async def _collect(self) -> None:
        async for segments in self.engine.segments():
            for segment in segments:
                live = self._by_id[segment.request]
                live.ids += segment.token_ids
                live.logprobs += segment.logprobs
                live.loads += [segment.version.step] * len(segment.token_ids)
                if segment.finish is not None:
                    live.finish = parts.reason_of(live, segment.finish)
                    del self.live[live.rid]
                    if not self.live:
                        self._idle.set()
                live.changed.set()

    async def _stream(self, request: web.Request, live: Live) -> web.StreamResponse:
        fault: Fault = FAULT.get()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for sent, upto, finish in self._pieces(live):
            if (after := fault.after) is not None and upto > after:
                if sent < after:
                    await parts.write(response, self._event(live, sent, after, None, fault.label))
                await self._misbehave(fault, request, response)
                return response
            await parts.write(response, self._event(live, sent, upto, finish, fault.label))
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _pieces(self, live: Live) -> AsyncIterator[tuple[int, int, dict[str, Any] | None]]:
        """From which token to which, and the reason with the last. An abort has an event of its own."""
        sent = 0
        while True:
            await live.changed.wait()
            live.changed.clear()
            while sent < len(live.ids):
                upto = min(sent + self.interval, len(live.ids))
                last = upto == len(live.ids) and live.finish is not None and live.finish["type"] != "abort"
                yield sent, upto, live.finish if last else None
                sent = upto
                if last:
                    return
            if live.finish is not None:
                yield sent, sent, live.finish
                return

    async def _misbehave(self, fault: Fault, request: web.Request, response: web.StreamResponse) -> None:
        if fault.silent_after is not None:
            await asyncio.Event().wait()
        elif fault.cut_after is not None:
            await asyncio.sleep(0.2)  # what was written before has been read
            assert request.transport is not None
            request.transport.abort()
        elif fault.garbage_after is not None:
            await response.write(b'data: {"text": "ab\n\n')
        elif fault.error_after is not None:
            said = {"message": "told to fail", "type": "invalid_request_error", "code": 400, "retryable": False}
            await parts.write(response, {"error": said if self.version == NEW else {"message": "told to fail"}})
            await response.write(b"data: [DONE]\n\n")
        else:
            reason = {"type": "abort", "message": "told to fail", "status_code": 500, "err_type": "InternalServerError"}
            await parts.write(response, {"text": "", "output_ids": [], "meta_info": {"id": "", "finish_reason": reason}})
            await response.write(b"data: [DONE]\n\n")

    def _event(self, live: Live, sent: int, upto: int, finish: dict[str, Any] | None, label: str) -> dict[str, Any]:
        aborted = finish is not None and finish["type"] == "abort"
        ids = live.ids[sent if self.incremental else 0 : upto]
        if aborted and (self.incremental or self.version == OLD):
            ids = live.ids[-1:]  # the last token, once more
        start = sent if self.incremental and self.version == NEW else 0
        triples = [[logprob, token_id, None] for token_id, logprob in zip(live.ids, live.logprobs, strict=True)][start:upto]
        meta: dict[str, Any] = {"id": live.rid, "finish_reason": finish, "completion_tokens": upto}
        if not aborted:
            meta |= {"prompt_tokens": live.prompt, "cached_tokens": 0}
        if not (aborted and self.version == OLD):
            meta["weight_version"] = label or (self.labels[live.loads[upto - 1]] if upto else self.label)
        if finish is not None and self.version == NEW:
            meta["weight_versions"] = self.spans(live)
        meta |= {"output_token_logprobs": triples, "input_token_logprobs": [], "e2e_latency": 0.1 if finish else None}
        return {"text": "", "output_ids": ids, "meta_info": meta}

    def spans(self, live: Live) -> list[dict[str, Any]]:
        borders = [at for at in range(1, len(live.loads)) if live.loads[at] != live.loads[at - 1]]
        edges = [0, *borders, len(live.loads)]
        return [
            {"version": self.labels[live.loads[start]], "start": start, "end": end}
            for start, end in pairwise(edges)
            if end > start
        ]

    # ------------------------------------------------------------------------------------- control

    async def _abort(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if body.get("abort_all"):
            for rid in list(self.live):
                self._order_abort(rid)
        else:
            self._order_abort(body.get("rid") or "")
        return web.Response()

    def _order_abort(self, rid: str) -> None:
        """Fire and forget. A name that is not known is dropped; one that is known is also the beginning of others."""
        if rid not in self.live:
            return
        names = [name for name, live in self._by_id.items() if live.rid in self.live and live.rid.startswith(rid)]
        if self.paused == "in_place":
            self._aborts += names
        else:
            self._start(self.engine.abort(names))

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await self._body(request)).get("mode", "abort")
        if mode not in ("abort", "in_place"):
            return web.json_response({"object": "error", "message": f"no mode {mode} here", "code": 400}, status=400)
        self._open.clear()
        self.paused = mode
        if mode == "in_place":
            await self.engine.pause(Rollover.KEEP)
        else:
            for rid in list(self.live):
                self._order_abort(rid)
            await self._idle.wait()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await self._body(request)
        if self.paused == "in_place":
            await self.engine.resume()
            self._start(self.engine.abort(self._aborts))
            self._aborts = []
        self.paused = ""
        self._open.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        busy = bool(self.live)
        text = "Failed to flush cache." if busy and self.version == NEW else "Cache flushed.\nPlease check backend logs."
        return web.Response(text=text, status=400 if busy else 200)

    async def _update(self, request: web.Request) -> web.Response:
        body, fault = await self._body(request), FAULT.get()
        paused = bool(self.paused)
        if not paused:  # the writer's lock: wait for what runs, let nothing in
            self._open.clear()
            await self._idle.wait()
        try:
            success, message = await self._take(body, fault)
        finally:
            if not paused:
                self._open.set()
        if success and body.get("weight_version") is not None and not (paused and self.version == OLD):
            self._label(fault.label or body["weight_version"])
            message += f" Weight version updated to {body['weight_version']}."
        answer = {"success": success, "message": message, "num_paused_requests": 0}
        return web.json_response(answer, status=200 if success else 400)

    async def _take(self, body: dict[str, Any], fault: Fault) -> tuple[bool, str]:
        path, flush = body["model_path"], body.get("flush_cache", True)
        if not await asyncio.to_thread(Path(path, "model.safetensors").is_file):
            return False, f"Failed to update weights: {path} has no weights. Rolling back to original weights."
        if flush and self.live and self.version == OLD:
            raise self._end("the cache of running requests was flushed")
        if not fault.pretend:
            await self._switch(path)
        self.path = path
        if flush and self.live:
            return False, "The weights were updated, but the cache was not flushed."
        return True, "Succeeded to update model weights."

    async def _switch(self, path: str) -> None:
        """The engine behind reads a folder; where there is none it takes what it has."""
        version = WeightVersion(self.loads)
        await self.engine.prepare(Manifest(version, (), 0, path))
        await self.engine.load(version)
        if path:
            self.labels.append(self.label)
        self.loads += 1

    def _label(self, label: str) -> None:
        self.label = self.labels[-1] = label

    async def _relabel(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        if body.get("abort_all_requests", True):
            for rid in list(self.live):
                self._order_abort(rid)
        self._label(FAULT.get().label or body["new_version"])
        message = f"Weight version updated to {body['new_version']}"
        return web.json_response({"success": True, "message": message, "new_version": body["new_version"]})

    async def _release(self, request: web.Request) -> web.Response:
        tags = set((await self._body(request)).get("tags") or ("weights", "kv_cache"))
        if self.live or not self.memory_saver:
            raise self._end("memory was taken from a server that was not idle, or cannot give it")
        if "kv_cache" in tags:
            await self.engine.sleep()
        self.released |= tags
        return web.json_response(None)

    async def _resume(self, request: web.Request) -> web.Response:
        tags = set((await self._body(request)).get("tags") or ("weights", "kv_cache"))
        if not tags <= self.released:
            raise self._end("memory was asked back that was not given")
        if "kv_cache" in tags:
            await self.engine.wake(WakePart.CACHE)
        self.released -= tags
        return web.json_response(None)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.path,
                "tokenizer_path": str(self.folder),
                "is_generation": True,
                "preferred_sampling_params": self.preferred,
                "weight_version": FAULT.get().label or self.label,
            }
        )

    async def _server_info(self, request: web.Request) -> web.Response:
        info: dict[str, Any] = {
            "model_path": str(self.folder),
            "max_total_num_tokens": self.slots * self.context,
            "max_req_input_len": self.context - 6,
            "max_running_requests": self.slots,
            "enable_memory_saver": self.memory_saver,
            "enable_weights_cpu_backup": self.weights_backup,
            "enable_deterministic_inference": self.deterministic,
            "internal_states": [{}],
            "version": self.version,
        }
        info["incremental_streaming_output" if self.version == NEW else "stream_output"] = self.incremental
        return web.json_response(info)


@asynccontextmanager
async def double(folder: Path, **options: Any) -> AsyncIterator[Double]:
    """A server that is up."""
    server = Double(folder, **options)
    await server.start()
    try:
        yield server
    finally:
        await server.close()
