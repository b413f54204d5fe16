"""A trainer, a reader and a harness that do all that there is to do: each route answers, and as its document says.

What `served.http` is answered is held against the document in every test of this folder (tests/serve/document.py).
"""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save, save_file

from rollyard.caller import Dropped
from rollyard.serve.client import Client
from rollyard.types import DropReason
from tests.serve.document import EVENTS, JSON, NDJSON, Document
from tests.serve.double import TOKEN, Served, batch, group, serving, until
from tests.serve.test_guard import listening
from tests.serve.test_rollouts import calls

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0, 4.0]])}
CHAT = {"model": "policy", "messages": [{"role": "user", "content": "?"}], "logprobs": True}
TEXT = {"model": "policy", "prompt": "?", "logprobs": 0, "n": 2}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


async def test_each_route_answers_as_its_document_says(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    save_file(WEIGHTS, disk / "w.safetensors")
    async with serving(tmp_path, serve__episodes=True, serve__weights_folder=str(disk)) as served:
        for path in ("/healthz", "/metrics", "/v1/models", "/v1/status"):
            await done(served, "GET", path)
        await trained(served)
        await played(served)
        await read(served)
        found = {route: {kind for each, kind in served.document.answered if each == route} for route in served.document.routes}
    assert not [route for route, kinds in found.items() if not kinds]
    assert found["GET", "/v1/groups/stream"] == {NDJSON, EVENTS}
    assert found["POST", "/v1/chat/completions"] == found["POST", "/v1/completions"] == {JSON, EVENTS}
    assert found["GET", "/v1/batch"] == {"", JSON}  # none yet; one


async def done(served: Served, method: str, path: str, **more: Any) -> httpx.Response:
    told = await served.http.request(method, path, **more)
    assert told.is_success, told.text
    return told


async def trained(served: Served) -> None:
    """A trainer publishes in each way that there is."""
    lease = await served.lease()
    await done(served, "POST", "/v1/trainer/renew", headers=lease)
    assert (await done(served, "GET", "/v1/batch", headers=lease)).status_code == 204
    for step in range(2):
        served.run.batch.put_nowait(batch(step, 2 * step, 2 * step + 1))
        await done(served, "GET", "/v1/batch", params={"wait_s": 5}, headers=lease)
        await done(served, "GET", "/v1/weights")
        if step == 0:
            await done(served, "PUT", "/v1/weights/1", content=save(WEIGHTS), headers=lease)
        else:
            named = {"path": "w.safetensors", "stats": {"loss": 0.5}}
            await done(served, "POST", "/v1/weights/2/file", json=named, headers=lease)
    await done(served, "DELETE", "/v1/trainer", headers=lease)
    served.run.batch.put_nowait(batch(2, 4))
    async with listening(served) as port:

        def by_a_group() -> int:
            with Client(f"http://127.0.0.1:{port}", TOKEN) as own:
                own._http.event_hooks["response"].append(lambda told: served.document.hold(told, told.read()))
                with own.trainer("another") as trainer:
                    next(trainer.batches())
                    return trainer.publish(WEIGHTS, way="group").step

        assert await asyncio.wait_for(asyncio.to_thread(by_a_group), 30) == 3


async def played(served: Served) -> None:
    """A harness asks in each way, and both ends of a session are said."""
    await done(served, "POST", "/v1/prompts", json={"prompts": [{"text": "?", "columns": {"answer": "5"}}], "key": "k"})
    served.run.admit(1, 2)
    for end, says in (("reward", {"value": 0.5, "parts": {"x": 1.0}}), ("failure", {"problem": "the tool broke"})):
        session = await served.session()
        for more in ({}, STREAMED):
            await done(served, "POST", "/v1/chat/completions", json=CHAT | more, headers=session)
            await done(served, "POST", "/v1/completions", json=TEXT | more, headers=session)
        path = f"/v1/sessions/{session['X-Rollyard-Session']}"
        await done(served, "GET", path)
        await done(served, "POST", f"{path}/{end}", json=says)
    await done(served, "GET", "/v1/status")
    await done(served, "POST", "/v1/prompts/end")


async def read(served: Served) -> None:
    """Readers of both kinds of stream, to its end, and of pages."""
    served.run.found.put_nowait(Dropped(9, DropReason.FAILED, "it burnt"))
    served.run.found.put_nowait(group(8, reward=None))
    page = await done(served, "GET", "/v1/groups", params={"after": 6, "wait_s": 5})
    assert page.json()["cursor"] in (6, 7)  # of groups that were trained, and one more
    streams = calls(served.service, "stream")
    path = "/v1/groups/stream"
    reading = [asyncio.create_task(done(served, "GET", path, headers={"Accept": kind})) for kind in (NDJSON, EVENTS)]
    await until(lambda: len(streams) == 2)
    served.service.drain()
    assert min(len(told.text.splitlines()) for told in await asyncio.gather(*reading)) >= 6


@pytest.mark.parametrize(
    ("status", "content", "right"),
    [
        (200, b'{"ok": true, "state": "running"}', True),
        (200, b'{"ok": "perhaps", "state": "running"}', False),
        (200, b'{"state": "running"}', False),
        (418, b"{}", False),
    ],
)
async def test_what_the_document_does_not_say_is_seen(tmp_path: Path, status: int, content: bytes, right: bool) -> None:
    async with serving(tmp_path) as served:
        told = (await served.http.get("/openapi.json")).json()
    request = httpx.Request("GET", "http://localhost/healthz")
    answer = httpx.Response(status, headers={"content-type": JSON}, content=content, request=request)
    with nullcontext() if right else pytest.raises(AssertionError):
        Document(told).hold(answer, content)
