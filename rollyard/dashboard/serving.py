"""The server: on loopback, for this user's browsers alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import uvicorn
from fastapi import FastAPI

from rollyard.dashboard.peers import Own
from rollyard.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
PATIENCE_S: Final = 3.0  # at the end, for answers that are under way; a second Ctrl-C does not wait
ASIDE_S: Final = 0.05  # between two looks at who is still connected


def bound(port: int) -> socket.socket:
    """A socket of this machine alone. Raises ConfigError when the port is somebody else's.

    Args:
        port: 0: one that is free.
    """
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((LOOPBACK, port))
    except OSError as error:
        made.close()
        remedy = "give another one, or none: then one that is free is taken"
        raise ConfigError(f"port {port} cannot be used: {error.strerror}", where="--port", remedy=remedy) from None
    return made


def address(line: socket.socket) -> str:
    """What a browser is to be given."""
    return f"http://{LOOPBACK}:{line.getsockname()[1]}/"


class Server(uvicorn.Server):
    """Says when it answers, and tells those who listen that it ends."""

    def __init__(self, app: FastAPI, ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            Own(app),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
        )
        super().__init__(config)
        self._ready, self._closing = ready, app.state.closing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._closing.set()
        leaving = asyncio.create_task(self._hang_up())
        await super().shutdown(sockets)
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving

    async def _hang_up(self) -> None:
        """Until all have left. uvicorn asks those to go that are connected when it closes: one that was accepted at that very
        moment would stay as long as the browser likes. An answer that takes longer than one waits for has nobody to hear it."""
        loop, state = asyncio.get_running_loop(), self.server_state
        until = loop.time() + PATIENCE_S
        while loop.time() < until:
            for connection in list(state.connections):
                connection.shutdown()
            await asyncio.sleep(ASIDE_S)
        for connection in list(state.connections):
            connection.transport.abort()


def serve(app: FastAPI, line: socket.socket, ready: Callable[[], None]) -> None:
    """Until Ctrl-C, which is how it is meant to end."""
    try:
        asyncio.run(Server(app, ready).serve(sockets=[line]))
    except KeyboardInterrupt:
        return
