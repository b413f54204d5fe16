"""The clients, one that blocks and one that does not, against the service."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save

from rollyard.environment import serve_token
from rollyard.errors import ConfigError
from rollyard.prompts.given import GivenPrompt
from rollyard.serve import calls
from rollyard.serve.client import AsyncClient, Client, Play, ServiceError, Trainer, tensors_of
from rollyard.types import Reward
from tests.serve.double import TOKEN, URL, Served, batch, group, serving
from tests.serve.test_guard import listening

WEIGHTS = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[3.0, 4.0]])}


def client(served: Served, token: str = TOKEN) -> AsyncClient:
    return AsyncClient(URL, token, httpx.ASGITransport(served.app))


def test_clients_need_no_torch() -> None:
    code = "import sys, rollyard.serve.client; assert not {'torch', 'transformers', 'fastapi', 'uvicorn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_a_trainer_elsewhere(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client(served) as own:
        prompts = ["?", [{"role": "user", "content": "?"}], GivenPrompt(token_ids=(1,), columns={"x": 1})]
        assert await own.submit(prompts) == (0, 1, 2)
        served.run.batch.put_nowait(batch(0, 5, 6))
        async with await own.trainer("mine") as trainer:
            with pytest.raises(ServiceError, match="mine trains already") as refused:
                await own.trainer("other", wait_s=0.1)
            assert (refused.value.status, refused.value.code) == (409, "leased")
            async for found in trainer.batches():
                assert found == batch(found.step, *((5, 6) if found.step == 0 else (7,)))
                served.service.desk._lease = None  # as if it had said nothing for too long
                await trainer.renew()
                with pytest.raises(ServiceError, match="other tensors"):
                    await trainer.publish({"a": WEIGHTS["a"]})
                with pytest.raises(ConfigError, match="loss is "):
                    await trainer.publish(WEIGHTS, {"loss": None})  # type: ignore[dict-item]
                version = await trainer.publish(WEIGHTS, {"loss": torch.tensor(0.5)})  # type: ignore[dict-item]
                assert version.step == found.step + 1
                served.run.batch.put_nowait(batch(1, 7) if found.step == 0 else None)
        assert (await own.status())["trainer"] is None
        seen = []
        async for cursor, each in own.groups():
            seen.append((cursor, each))
            if len(seen) == 3:
                break
        assert seen == [(1, group(5)), (2, group(6)), (3, group(7))]
        assert [torch.equal(each["weights"]["b"], WEIGHTS["b"]) for each in served.run.published] == [True, True]
        with pytest.raises(ConfigError, match="prompt 1: its columns are no JSON: nan"):
            await own.submit(["?", GivenPrompt("?", columns={"x": float("nan")})])
        with pytest.raises(ConfigError, match="no list of prompts"):
            await own.submit("?")
        await own.end_of_prompts()
        with pytest.raises(ServiceError, match="ended before"):
            await own.submit(["?"])


async def test_a_harness_elsewhere(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__episodes=True) as served, client(served) as own:
        await own.submit([GivenPrompt("?", columns={"answer": "hello"})])
        served.run.admit(1, size=2)
        first, second = await own.play(0), await own.play()
        assert (first.group, first.text, first.columns) == (0, "?", {"answer": "hello"}) and first.session != second.session
        asked = {"model": first.model, "messages": [{"role": "user", "content": first.text}]}
        assert (await served.http.post("/v1/chat/completions", json=asked)).status_code == 200
        await own.judge(first, 1.0, {"exact": 1.0})
        await own.fail(second, "it broke")
        ends = [(await episode).verdict for episode in served.run.episodes]
        assert ends == [Reward(1.0, {"exact": 1.0}), Reward(None, problem="it broke")]
        with pytest.raises(ServiceError, match="no member"):
            await own.play(wait_s=0.2)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "http://", "ftp://x", "http://[::1", "http://\ud800", "http://a\0", None])
def test_what_is_no_address_is_told_at_once(url: Any) -> None:
    with pytest.raises(ConfigError, match="no address of a service"):
        Client(url)


@pytest.mark.parametrize("token", ["tök", "a\nb", "a ", None])
def test_what_no_header_has_is_no_token(token: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no header of HTTP"):
        Client(URL, token)
    if token is not None:
        monkeypatch.setenv("ROLLYARD_TOKEN", token)
        with pytest.raises(ConfigError, match="ROLLYARD_TOKEN"):
            serve_token()


@pytest.mark.parametrize("content", ["<html>", "[]", "{}", "null", "[" * 100_000])
def test_an_answer_of_somebody_else_is_told(content: str) -> None:
    other = Client(URL, transport=httpx.MockTransport(lambda request: httpx.Response(200, text=content)))
    asks: list[Callable[[], object]] = [
        lambda: other.submit(["?"]),
        lambda: next(other.outcomes()),
        lambda: other.trainer("a"),
        other.play,
    ]
    asks.append(lambda: next(Trainer(other, "a", "b").batches()))
    for ask in asks:
        with pytest.raises(ServiceError, match="no service of this version of Rollyard"):
            ask()


@pytest.mark.parametrize("value", [float("nan"), 1e300, "1"])
def test_what_is_no_verdict_is_told_where_it_is_given(value: Any) -> None:
    with Client(URL) as own, pytest.raises(ConfigError, match="the harness returned"):
        own.judge(Play("s", 0, "?", (), {}), value)


async def test_requests_that_get_lost_are_made_again_and_others_when_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "AGAIN_S", 0.001)
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.content)
        if len(seen) < 3:
            raise httpx.ReadError("the line is dead")
        if len(seen) == 3:
            return httpx.Response(429, json={"error": {"message": "full", "code": "full"}}, headers={"Retry-After": "0"})
        return httpx.Response(202, json={"ids": [4]})

    async with AsyncClient(URL, transport=httpx.MockTransport(answer)) as own:
        assert await own.submit(["?"]) == (4,)
    assert len(seen) == 4 and len(set(seen)) == 1, "under one key"
    with pytest.raises(ServiceError, match="cannot be reached"):
        dead = httpx.MockTransport(lambda request: (_ for _ in ()).throw(httpx.ConnectError("nobody")))
        Client(URL, transport=dead).status()
    with pytest.raises(ServiceError, match="502"):
        Client(URL, transport=httpx.MockTransport(lambda request: httpx.Response(502, text="<html>"))).status()


async def test_weights_by_a_torch_group(tmp_path: Path) -> None:
    """No file: the trainer and the service meet, and tensors go from one memory to the other."""
    async with serving(tmp_path) as served, listening(served) as port:

        def train() -> list[int]:
            versions = []
            with Client(f"http://127.0.0.1:{port}", TOKEN) as own, own.trainer("mine") as trainer:
                for found in trainer.batches():
                    assert found.step == len(versions)
                    with pytest.raises(ServiceError, match="only on one side"):
                        trainer.publish(WEIGHTS | {"c": torch.zeros(1)}, way="group")
                    with pytest.raises(ServiceError, match="was sent as"):
                        trainer.publish(WEIGHTS | {"a": torch.zeros(3)}, way="group")
                    versions.append(trainer.publish(WEIGHTS, {"loss": 0.5}, way="group").step)
            return versions

        training = asyncio.create_task(asyncio.to_thread(train))
        for step in range(2):
            served.run.batch.put_nowait(batch(step, step))
        served.run.batch.put_nowait(None)
        assert await asyncio.wait_for(training, 30) == [1, 2]
        (_, last) = served.run.published
        assert last["stats"] == {"loss": 0.5} and all(torch.equal(last["weights"][name], WEIGHTS[name]) for name in WEIGHTS)


async def test_weights_of_a_common_disk(tmp_path: Path) -> None:
    """By their path alone, from the client that blocks and from the one that does not."""
    (tmp_path / "new.safetensors").write_bytes(save(WEIGHTS))
    async with serving(tmp_path, serve__weights_folder=str(tmp_path)) as served, listening(served) as port:

        def train() -> int:
            with Client(f"http://127.0.0.1:{port}", TOKEN) as own, own.trainer("one") as trainer:
                next(trainer.batches())
                return trainer.publish_path("new.safetensors", {"loss": 0.5}).step

        served.run.batch.put_nowait(batch(0, 5))
        assert await asyncio.wait_for(asyncio.to_thread(train), 30) == 1
        served.run.batch.put_nowait(batch(1, 6))
        async with client(served) as own, await own.trainer("other") as trainer:
            await anext(trainer.batches())
            assert (await trainer.publish_path("new.safetensors")).step == 2
        first, second = served.run.published
        assert first["stats"] == {"loss": 0.5} and not second["stats"]
        assert all(torch.equal(each["weights"]["b"], WEIGHTS["b"]) for each in (first, second))


def test_a_tied_head_travels_once() -> None:
    shared = torch.ones(2, 2)
    found = tensors_of({"model.embed_tokens.weight": shared, "lm_head.weight": shared, "empty": torch.zeros(0)})
    assert set(found) == {"model.embed_tokens.weight", "empty"}
