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
WAY_OUT: Final = 'docs/dashboard.md, "In a container", has a way out'

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
        if scope["type"] == "http" and self._table.exists() and (why := self._refuses(scope["client"], scope["server"])):
            await PlainTextResponse(f"{why}\n", 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refuses(self, there: End, here: End) -> str:
        """Why; nothing where there is no reason."""
        try:
            user = owner(there, here, self._table)
        except OSError as error:
            return f"nobody is answered: whose connection this is cannot be looked up: {self._table}: {error.strerror}. {WAY_OUT}"
        if user is None:
            return f"not answered: the system does not say whose connection this is ({self._table} does not have it). {WAY_OUT}"
        return "" if user in self._may else "this is another user's run"
