"""Who may ask, and how much."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from rollyard.errors import ConfigError
from rollyard.serve import app as apps
from rollyard.serve import server as servers
from rollyard.serve.server import Server
from rollyard.serve.settings import check_address
from tests.serve.double import TOKEN, Served, batch, config, group, serving


async def test_a_token_is_asked_for_everywhere_but_where_health_is(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        for given in ("", "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xff"):
            headers = {"Authorization": given.encode("latin-1")}
            for path in ("/v1/status", "/openapi.json", "/none"):
                told = await served.http.get(path, headers=headers)  # type: ignore[arg-type]
                assert told.status_code == 401 and told.headers["www-authenticate"] == "Bearer" and TOKEN not in told.text
            assert (await served.http.get("/healthz", headers=headers)).status_code == 200  # type: ignore[arg-type]
        assert (await served.http.get("/v1/status")).status_code == 200
    async with serving(tmp_path, token="") as served:
        assert (await served.http.get("/v1/status", headers={"Authorization": ""})).status_code == 200


def test_another_address_than_loopback_needs_a_token() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.8.8.8"):
        check_address(host, "")
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org"):
        with pytest.raises(ConfigError, match="ROLLYARD_TOKEN"):
            check_address(host, "")
        check_address(host, "secret")


async def test_pages_of_a_browser_are_refused_whatever_name_they_have_led_here(tmp_path: Path) -> None:
    async with serving(tmp_path, token="", serve__names=("gpu7",)) as served:
        for host in ("localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.0.7:80", "gpu7"):
            assert (await served.http.get("/v1/status", headers={"Host": host})).status_code == 200, host
        for host in ("example.org", "localhost.example.org", "gpu7.example.org:8000", "", "127.0.0.1.example.org", "[::1"):
            told = await served.http.get("/v1/status", headers={"Host": host})
            assert (told.status_code, told.json()["error"]["code"]) == (421, "host"), host
        told = await served.http.post("/v1/prompts/end", headers={"Origin": "http://example.org"})
        assert told.status_code == 403 and not served.run.source.take(1)[1]


async def test_bodies_have_an_end(tmp_path: Path) -> None:
    async with serving(tmp_path, serve__body_mib=1, serve__body_s=0.2, serve__weights_gib=2e-9) as served:
        assert (await served.http.post("/v1/prompts", content=b"x" * (2**20 + 1))).status_code == 413
        for declared in ("9" * 4000, "-1", "x"):
            told = await served.http.post("/v1/prompts", content=b"{}", headers={"Content-Length": declared})
            assert told.status_code == 413

        async def endless(pause_s: float) -> AsyncIterator[bytes]:
            while True:
                yield b" " * 2**16
                await asyncio.sleep(pause_s)

        assert (await served.http.post("/v1/prompts", content=endless(0))).status_code == 413
        assert (await served.http.post("/v1/prompts", content=endless(0.05))).status_code == 408
        lease = await served.lease()
        served.run.batch.put_nowait(batch(0, 1))
        await served.http.get("/v1/batch", params={"wait_s": 5}, headers=lease)
        assert (await served.http.put("/v1/weights/1", content=b"x" * 99, headers=lease)).status_code == 413


@contextlib.asynccontextmanager
async def listening(served: Served, **options: object) -> AsyncIterator[int]:
    """The port of a real server."""
    server = Server(served.app, config(serve__drain_s=1, **options).serve)
    with socket.create_server(("127.0.0.1", 0)) as line:
        going = asyncio.create_task(server.serve([line]))
        while not server.started:  # noqa: ASYNC110 (it sets no event)
            await asyncio.sleep(0.01)
        try:
            yield line.getsockname()[1]
        finally:
            server.stop()
            await going


async def test_heads_and_connections_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "HEAD_S", 0.3)
    async with serving(tmp_path) as served, listening(served, serve__connections=4) as port:

        async def said(*pieces: bytes, pause_s: float = 0.0) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            found = b""
            with contextlib.suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(pause_s)
            with contextlib.suppress(ConnectionError):
                found = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            return found

        assert await said(b"") == b"", "who says nothing is not waited for"
        assert await said(*[b"GET / HTTP/1.1\r\nHost: localhost\r\n", *[b"x: y\r\n"] * 20], pause_s=0.05) == b""
        long = await said(b"GET /" + b"x" * 2**17 + b" HTTP/1.1\r\n\r\n")
        assert long.split(b"\r\n")[0] in (b"", b"HTTP/1.1 400 Bad Request"), "it may be hung up on before it has read that"
        assert b" 400 " in (await said(b"\x00\xff\r\n\r\n")).split(b"\r\n")[0]
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        told = await said(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b" 503 " in told.split(b"\r\n")[0]
        for _, writer in held:
            writer.close()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            for _ in range(2):  # and a kept connection may rest longer than a head may take
                assert (await http.get("/healthz")).status_code == 200
                await asyncio.sleep(0.4)


@pytest.mark.slow
async def test_a_reader_that_reads_nothing_is_hung_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What it has not read is there when it comes back."""
    monkeypatch.setattr(apps, "SEND_S", 0.3)
    async with serving(tmp_path) as served, listening(served) as port:
        long = group(0).prompt
        for id_ in range(60):
            columns = {"x": str(id_) * 100_000}
            served.run.found.put_nowait(replace(group(id_), prompt=replace(long, id=id_, columns=columns)))
        assert (await served.http.get("/v1/groups", params={"after": 59, "wait_s": 5})).json()["cursor"] == 60
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(f"GET /v1/groups/stream HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
        await writer.drain()
        await asyncio.sleep(1.0)
        found = 0
        with contextlib.suppress(ConnectionError):
            while piece := await asyncio.wait_for(reader.read(2**20), 5):
                found += len(piece)
        assert 0 < found < 60 * 100_000
        writer.close()
        assert (await served.http.get("/v1/groups", params={"after": 59})).json()["cursor"] == 60
    assert not caplog.records


async def test_an_upload_that_is_given_up_leaves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as served, listening(served) as port:
        lease = (await served.lease())["X-Rollyard-Lease"]
        served.run.batch.put_nowait(batch(0, 1))
        await served.http.get("/v1/batch", params={"wait_s": 5}, headers={"X-Rollyard-Lease": lease})
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"PUT /v1/weights/1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nX-Rollyard-Lease: {lease}\r\n"
        writer.write(f"{head}Content-Length: 1000\r\n\r\n".encode() + b"x" * 500)
        await writer.drain()
        await until(lambda: drafts(tmp_path))
        writer.close()
        await until(lambda: not drafts(tmp_path))
        assert not served.run.published and served.service.desk.step == 0
    assert not caplog.records


def drafts(folder: Path) -> list[Path]:
    return list(folder.glob(".upload*"))


async def until(comes: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not comes():  # noqa: ASYNC110 (a file tells nobody)
            await asyncio.sleep(0.01)
