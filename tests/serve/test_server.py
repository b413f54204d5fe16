"""The server ends when it is told to, whoever is connected."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest

from rollyard.serve.server import Server
from tests.serve.double import config, serving

ASKS = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("asks", [b"", ASKS[:20], ASKS])
async def test_who_comes_as_it_closes_does_not_keep_it(tmp_path: Path, asks: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A client comes again at once when it was told to."""
    async with serving(tmp_path) as served:
        server = Server(served.app, config(serve__drain_s=10).serve)
        with socket.create_server(("127.0.0.1", 0)) as line:
            where = line.getsockname()
            task = asyncio.create_task(server.serve([line]))
            while not server.started:  # noqa: ASYNC110 (it sets no event)
                await asyncio.sleep(0.01)
            server.stop()
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
    assert took < 3 and [record for record in caplog.record_tuples if record[1] >= logging.WARNING] == []
