"""A server ends when it is told to, whoever is connected, and complains of nobody."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from contextlib import suppress

import pytest
from fastapi import FastAPI

from rollyard.dashboard import serving
from rollyard.dashboard.serving import Server, bound

ASKS = b"GET /%s HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def application() -> FastAPI:
    app = FastAPI()
    app.state.closing = asyncio.Event()
    return app


async def started(app: FastAPI, line: socket.socket) -> tuple[Server, asyncio.Task[None]]:
    ready = asyncio.Event()
    server = Server(app, ready.set)
    task = asyncio.create_task(server.serve(sockets=[line]))
    await ready.wait()
    return server, task


@pytest.mark.parametrize("asks", [b"", ASKS % b"there"])
async def test_who_comes_as_it_closes_does_not_keep_it(asks: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A browser comes again at once when its stream has ended."""
    app = application()
    app.get("/there")(lambda: "here")
    with bound(0) as line:
        where = line.getsockname()
        server, task = await started(app, line)
        server.should_exit = True
        time.sleep(0.2)  # noqa: ASYNC251 - the loop stands still: the connection and the end are seen at once
        with socket.create_connection(where) as client:
            client.sendall(asks)
            begun = time.monotonic()
            await asyncio.wait_for(task, 20)
            took = time.monotonic() - begun
            client.settimeout(5)
            with suppress(ConnectionResetError):  # what it asked may be left unread
                while client.recv(4096):
                    pass
    assert took < serving.PATIENCE_S / 2 and caplog.record_tuples == []


async def test_an_answer_that_takes_too_long_is_not_heard(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "PATIENCE_S", 0.2)
    app, asked, answer = application(), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    @app.get("/slow")
    def slow() -> str:
        loop.call_soon_threadsafe(asked.set)
        assert answer.wait(20)
        return "late"

    with bound(0) as line:
        where = line.getsockname()
        server, task = await started(app, line)
        with socket.create_connection(where) as client:
            client.sendall(ASKS % b"slow")
            await asyncio.wait_for(asked.wait(), 20)
            server.should_exit = True
            assert await asyncio.to_thread(client.recv, 1) == b""
            answer.set()
            await asyncio.wait_for(task, 20)
    assert [record for record in caplog.record_tuples if record[1] >= logging.WARNING] == []
