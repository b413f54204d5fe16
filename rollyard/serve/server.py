"""uvicorn, with a limit on all that a connection may do: heads of requests too, which it lets take as long as they like."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rollyard.serve.guard import App, Unread
from rollyard.serve.settings import ServiceConfig

HEAD: Final = 32 * 2**10  # bytes of a request's head at most
HEAD_S: Final = 15.0  # seconds from a connection, or the answer before, until the whole head has come
ASIDE_S: Final = 0.05  # between two looks at who is still connected, at the end
ALIVE_S: Final = 60  # seconds that a connection may be kept without a request


class Protocol(H11Protocol):
    """One connection. Until a head is whole, it has `HEAD_S` left."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._come()
        elif self._late is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._come()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._late = self.loop.call_later(HEAD_S, self.transport.close)

    def _come(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None


def _is_ours(record: logging.LogRecord) -> bool:
    """A client that was hung up on is no fault of the application's."""
    return not (record.exc_info and isinstance(record.exc_info[1], Unread))


class Server(uvicorn.Server):
    """Serves an application on a socket that is there. Signals are heard by whoever starts it."""

    def __init__(self, app: App, serve: ServiceConfig) -> None:
        log = logging.getLogger("uvicorn.error")
        log.setLevel(logging.ERROR)  # what clients do wrong is told to them
        log.addFilter(_is_ours)
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=serve.connections,
            timeout_keep_alive=ALIVE_S,
            timeout_graceful_shutdown=max(1, round(serve.drain_s)),
            h11_max_incomplete_event_size=HEAD,
        )
        super().__init__(config)

    def stop(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        leaving = asyncio.create_task(self._hang_up())
        try:
            await super().shutdown(sockets)
        finally:
            leaving.cancel()
            await asyncio.wait((leaving,))

    async def _hang_up(self) -> None:
        """On who asks nothing, until all have left. uvicorn does it once: who was accepted at that very moment would stay for as
        long as answers may take."""
        while True:
            for connection in [each for each in self.server_state.connections if not each.transport.is_closing()]:
                connection.shutdown()
            await asyncio.sleep(ASIDE_S)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
