"""Whose browser asks: loopback is there for every user of a machine, and a run's texts are for its own."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Final

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

TABLE: Final = Path("/proc/net/tcp")  # of the system: all connections, and the user of each end that is here
ROOT: Final = 0

End = tuple[str, int]  # address and port


def owner(there: End, here: End, table: Path = TABLE) -> int | None:
    """The user who holds the other end of a connection; None when there is no such connection. Raises OSError."""
    wanted = [_hexed(there), _hexed(here)]
    with table.open(encoding="ascii") as lines:
        for line in lines:
            words = line.split()
            if words[1:3] == wanted:
                return int(words[7])
    return None


def _hexed(end: End) -> str:
    """As the table has it."""
    return f"{int.from_bytes(socket.inet_aton(end[0]), sys.byteorder):08X}:{end[1]:04X}"


class Own:
    """Answers this user and root alone. Where the system has no such table, everybody who reaches it."""

    def __init__(self, app: ASGIApp, table: Path = TABLE) -> None:
        self._app, self._table = app, table
        self._may = {os.getuid(), ROOT}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and self._table.exists()
            and owner(scope["client"], scope["server"], self._table) not in self._may
        ):
            refused = PlainTextResponse("this is another user's run\n", 403)
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)
