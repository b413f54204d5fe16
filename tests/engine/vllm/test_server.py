"""The line to a vLLM server that runs already: what it lacks is told with the remedy, what a run left is mended.

A double answers as vLLM's server does on the routes that are used here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from rollyard.engine.http import Client
from rollyard.engine.vllm.server import ServerCore
from rollyard.errors import ConfigError, EngineError, EngineLost
from rollyard.types import WeightVersion

ABOUT = {
    "version": "0.32.0",
    "logprobs_mode": "processed_logprobs",
    "policy": "priority",
    "backend": "rollyard",
    "stream_interval": 1,
    "cut_prompts": False,
    "speculative": False,
    "replicas": 1,
    "devices": 1,
    "window": 256,
    "slots": 8,
}


class Server:
    """Its weights are taken apart between the beginning and the end of an update; a step then would end it."""

    def __init__(self, *, about: Mapping[str, object] = ABOUT, dev: bool = True, generate: int = 400) -> None:
        self._about, self._dev, self._generate = about, dev, generate
        self.updating = self.paused = False
        self.label = "default"
        self.broken = 0  # updates of weights that fail
        self.dead = False
        self.heard: list[str] = []
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        app = web.Application()
        app.add_routes([web.get("/health", self._health), web.post("/{path:.*}", self._post)])
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield self
        finally:
            await runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=500 if self.dead else 200)

    async def _post(self, request: web.Request) -> web.Response:
        path = request.path
        self.heard.append(path)
        if path == "/inference/v1/generate":
            return _error(self._generate, "Scale-out endpoints are disabled.")
        if not self._dev:
            return _error(404, "Not Found")
        body: dict[str, Any] = await request.json()
        answer = getattr(self, f"_{path[1:]}")(body)
        return answer if isinstance(answer, web.Response) else web.json_response(answer)

    def _collective_rpc(self, body: dict[str, Any]) -> object:
        return {"results": [{**self._about, "updating": self.updating}]}

    def _pause(self, body: dict[str, Any]) -> object:
        self.paused = True
        return {"status": "paused"}

    def _resume(self, body: dict[str, Any]) -> object:
        self.dead = self.dead or self.updating
        self.paused = False
        return {"status": "resumed"}

    def _init_weight_transfer_engine(self, body: dict[str, Any]) -> object:
        return {"message": "Weight transfer initialized"}

    def _shutdown_weight_transfer_engine(self, body: dict[str, Any]) -> object:
        return _error(500, "during a weight update") if self.updating else {"message": "Weight transfer shut down"}

    def _start_weight_update(self, body: dict[str, Any]) -> object:
        if self.updating:
            return _error(500, "a weight update is already active")
        self.updating = True
        return {"message": "Weight update started"}

    def _update_weights(self, body: dict[str, Any]) -> object:
        if self.broken:
            self.broken -= 1
            return _error(503, "try later")  # whether it was begun, nobody knows
        return {"message": "Weights updated"}

    def _finish_weight_update(self, body: dict[str, Any]) -> object:
        if not self.updating:
            return _error(500, "finish_weight_update called without a matching start_weight_update.")
        self.updating = False
        self.label = body.get("weight_version") or self.label
        return {"message": "Weight update finished"}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


@asynccontextmanager
async def core(server: Server, **options: Any) -> AsyncIterator[ServerCore]:
    made = ServerCore(Client(server.url), start_s=5.0, sync_s=5.0, window=256, **options)
    try:
        yield made
    finally:
        await made.close()


@pytest.mark.parametrize(
    ("server", "told"),
    [
        (Server(dev=False), "VLLM_SERVER_DEV_MODE=1"),
        (Server(generate=403), "--enable-scale-out"),
        (Server(generate=404), "--enable-scale-out"),
        (Server(generate=401), "ROLLYARD_ENGINE_KEY"),
        (Server(about=ABOUT | {"backend": ""}), "--weight-transfer-config"),
        (Server(about=ABOUT | {"logprobs_mode": "raw_logprobs"}), "--logprobs-mode processed_logprobs"),
        (Server(about=ABOUT | {"policy": "fcfs"}), "--scheduling-policy priority"),
        (Server(about=ABOUT | {"stream_interval": 4}), "stream_interval 4"),
        (Server(about=ABOUT | {"speculative": True}), "speculative True"),
        (Server(about=ABOUT | {"cut_prompts": True}), "cut_prompts True"),
        (Server(about=ABOUT | {"replicas": 2}), "replicas 2"),
        (Server(about=ABOUT | {"window": 128}), "--max-model-len 256"),
        (Server(about={}), "--worker-extension-cls"),
    ],
)
async def test_what_a_server_lacks_is_told_with_the_remedy(server: Server, told: str) -> None:
    async with server.running(), core(server) as made:
        with pytest.raises(ConfigError) as raised:
            await made.start("module:function", "{}")
        assert told in str(raised.value) and server.url in raised.value.problem
        assert "/init_weight_transfer_engine" not in server.heard


async def test_one_of_many_devices() -> None:
    async with Server(about=ABOUT | {"devices": 2}).running() as server:
        async with core(server, one_device=True) as made:
            with pytest.raises(ConfigError, match=r"weights.transport: .* 2 devices"):
                await made.start("module:function", "{}")
        async with core(server) as made:
            assert await made.start("module:function", "{}") == 8


async def test_a_run_that_left_an_update_half_way() -> None:
    """Its server is paused in the middle of it; the next run ends that before it lets anything go on."""
    async with Server().running() as server:
        server.updating = server.paused = True
        async with core(server) as made:
            await made.start("module:function", "{}")
            assert not server.updating and not server.paused and not server.dead
            await made.update(WeightVersion(1), "0.1.0")
            assert server.label == "0.1.0"


async def test_an_update_that_failed_is_ended_before_the_next() -> None:
    async with Server().running() as server, core(server) as made:
        await made.start("module:function", "{}")
        server.broken = 1
        with pytest.raises(EngineError, match="try later"):
            await made.update(WeightVersion(1), "0.1.0")
        await made.update(WeightVersion(1), "1.1.0")
        assert server.label == "1.1.0"


async def test_leaving_after_an_update_that_failed() -> None:
    async with Server().running() as server:
        async with core(server) as made:
            await made.start("module:function", "{}")
            await made.stand_still()
            server.broken = 1
            with pytest.raises(EngineError):
                await made.update(WeightVersion(1), "0.1.0")
        assert not server.dead and not server.paused and server.heard[-1] == "/shutdown_weight_transfer_engine"


async def test_leaving_a_server_that_has_died() -> None:
    server = Server()
    async with core(server) as made:
        async with server.running():
            made._client.url = server.url
            await made.start("module:function", "{}")
        with pytest.raises(EngineLost):
            await made.go_on()
        await asyncio.wait_for(made.close(), 5)
