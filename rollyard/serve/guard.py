"""Who may ask, and how much: what stands before every route. An ASGI application around another one.

A page of a browser that a user visits may make requests to this machine too. It cannot choose the `Host` header, and sends its
`Origin`: whoever asks by a name that is none of ours, or from a page, is refused.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

from rollyard.serve.refusals import Refused

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

OPEN = ("/healthz",)  # asked by whoever looks whether we are there
HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?")
LONG = ("/v1/weights/",)  # whose bodies are streamed to the disk, which have limits of their own


class Guard:
    """Lets through what may come.

    Args:
        app: what is guarded.
        token: that clients must give; empty: none.
        names: by which the service may be asked for, lower case.
        most: bytes of a body.
        body_s: seconds that a body may take.
        send_s: seconds that a client may leave what it is sent unread.
    """

    def __init__(self, app: App, token: str, names: Iterable[str], most: int, body_s: float, send_s: float) -> None:
        self._app, self._token, self._names = app, token.encode(), frozenset(names)
        self._most, self._body_s, self._send_s = most, body_s, send_s

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        bounded = _Bounded(receive, send, self._most, self._body_s, self._send_s)
        try:
            if scope["type"] != "http":
                return
            self._check(scope)
            if not _streams(scope):
                await bounded.take(scope)
            await self._app(scope, bounded.receive, bounded.send)
        except Refused as refused:
            if not bounded.begun:  # else it comes too late
                await refuse(bounded.send, refused)
        except _Gone:
            return

    def _check(self, scope: MutableMapping[str, Any]) -> None:
        headers = _headers(scope)
        if not self._named(headers.get(b"host", b"")):
            problem, remedy = "the service is not called so", "serve.names may have further names"
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, problem, "host", "host", remedy)
        if b"origin" in headers:
            raise Refused(HTTPStatus.FORBIDDEN, "pages of browsers are not answered", "origin", "origin")
        if scope["path"] in OPEN or not self._token:
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._token):
            problem, remedy = "the token is missing, or another one", "send the header `Authorization: Bearer TOKEN`"
            raise Refused(HTTPStatus.UNAUTHORIZED, problem, "token", "authorization", remedy)

    def _named(self, given: bytes) -> bool:
        """A number is no name that somebody else could have led here."""
        found = HOST.fullmatch(given.decode("latin-1").lower())
        if found is None:
            return False
        name = found[1] or found[2]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name in self._names
        return True


class Unread(ConnectionAbortedError):
    """The client leaves what it is sent unread. It is hung up on."""


class _Gone(Exception):
    """The client has hung up before it had asked."""


class _Bounded:
    """One request's line, with limits."""

    def __init__(self, receive: Receive, send: Send, most: int, body_s: float, send_s: float) -> None:
        self._receive, self._send = receive, send
        self._most, self._body_s, self._send_s = most, body_s, send_s
        self._body: bytes | None = None
        self.begun = False  # the answer has

    async def take(self, scope: MutableMapping[str, Any]) -> None:
        """All of the body, before anything looks at it. Raises Refused, or _Gone."""
        declared = _headers(scope).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > self._most:
            raise self._too_much
        body = bytearray()
        try:
            async with asyncio.timeout(self._body_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise _Gone
                    body += message.get("body", b"")
                    if len(body) > self._most:
                        raise self._too_much
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            problem = f"the body took longer than {self._body_s:g} s"
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, problem, "slow") from None
        self._body = bytes(body)

    @property
    def _too_much(self) -> Refused:
        return Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {self._most} bytes here", "size")

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        return await self._receive()

    async def send(self, message: Message) -> None:
        """Raises Unread when the client leaves it so for too long: what streams to it ends."""
        self.begun = True
        try:
            async with asyncio.timeout(self._send_s):
                await self._send(message)
        except TimeoutError:
            raise Unread(f"the client read nothing for {self._send_s:g} s") from None


async def refuse(send: Send, refused: Refused) -> None:
    """Send it."""
    headers = {"content-type": "application/json", "content-length": str(len(refused.body)), **refused.headers}
    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": pairs})
    await send({"type": "http.response.body", "body": refused.body, "more_body": False})


def own_names(host: str, more: Iterable[str]) -> set[str]:
    """By which a service on this address may be asked for."""
    return {name.lower() for name in ("localhost", socket.gethostname(), host, *more)}


def _headers(scope: MutableMapping[str, Any]) -> dict[bytes, bytes]:
    return dict(scope["headers"])


def _streams(scope: MutableMapping[str, Any]) -> bool:
    return scope["method"] == "PUT" and str(scope["path"]).startswith(LONG)
