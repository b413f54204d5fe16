"""Which server gets the next request: the least loaded one that is well and has room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from rollyard.engine.openai.failure import ServerError, Voice
from rollyard.engine.openai.limits import Limits


@dataclass(slots=True, eq=False)
class Server:
    """One server and what is under way there. Times are the event loop's."""

    url: str  # without a slash at its end
    voice: Voice
    in_flight: int = 0  # requests
    tokens: int = 0  # asked by those
    asked: int = 0  # requests so far
    failures: int = 0  # in a row
    aside_until: float = 0.0  # not asked while another one is well
    not_before: float = 0.0  # it said so itself


@dataclass(slots=True)
class _Place:
    """A request in the queue. The first in it goes first, whatever its size."""

    rank: tuple[int, int]
    tokens: int
    granted: asyncio.Future[Server] = field(compare=False)

    def __lt__(self, other: _Place) -> bool:
        return self.rank < other.rank


class Servers:
    """Hands out places at the servers, in order of (priority, arrival).

    A server that failed is avoided for a while, then asked once, and trusted again when it answers. When all have
    failed they are asked all the same: each call's own backoff bounds the rate. A time that a server names is kept.
    """

    def __init__(self, servers: Sequence[Server], limits: Limits) -> None:
        self.all = tuple(servers)
        self._limits = limits
        self._queue: list[_Place] = []
        self._order = count()
        self._alarm: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def place(self, tokens: int, priority: int = 0) -> AsyncIterator[Server]:
        """Wait for a place at some server and hold it. `tokens` is what is asked: prompt, and what may be written."""
        place = _Place((priority, next(self._order)), tokens, asyncio.get_running_loop().create_future())
        heappush(self._queue, place)
        self._hand_out()
        try:
            server = await place.granted
        except asyncio.CancelledError:
            if place.granted.done() and not place.granted.cancelled():
                self._give_back(place.granted.result(), tokens)
            raise
        try:
            yield server
        finally:
            self._give_back(server, tokens)

    def answered(self, server: Server) -> None:
        """It is well."""
        server.failures, server.aside_until = 0, 0.0
        self._hand_out()

    def failed(self, server: Server, error: ServerError) -> None:
        """A try there failed with an error that is not the request's own fault."""
        now = _now()
        if error.after_s is not None:
            server.not_before = max(server.not_before, now + error.after_s)
        if (error.status is None or error.status < 400 or error.status >= 500) and now >= server.aside_until:
            server.failures += 1  # once for all that failed together
            server.aside_until = now + min(self._limits.aside_most_s, self._limits.aside_s * 2 ** min(server.failures - 1, 32))

    def open_at(self) -> float:
        """When a server may be asked again, by their own words."""
        return min(server.not_before for server in self.all)

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()

    def _give_back(self, server: Server, tokens: int) -> None:
        server.in_flight -= 1
        server.tokens -= tokens
        self._hand_out()

    def _hand_out(self) -> None:
        now = _now()
        while self._queue:
            if self._queue[0].granted.done():  # who waited was cancelled
                heappop(self._queue)
            elif (server := self._best(now)) is not None:
                place = heappop(self._queue)
                server.in_flight += 1
                server.tokens += place.tokens
                server.asked += 1
                place.granted.set_result(server)
            else:
                self._set_alarm(now)
                return

    def _best(self, now: float) -> Server | None:
        well = [server for server in self.all if server.aside_until <= now] or self.all
        free = [server for server in well if server.not_before <= now and server.in_flight < self._room(server, now)]
        return min(free, key=lambda server: (server.tokens, server.in_flight, server.asked), default=None)

    def _room(self, server: Server, now: float) -> int:
        """Requests under way there at most: one for a server on trial, while another is well."""
        trial = server.failures and server.aside_until <= now and not all(other.failures for other in self.all)
        return 1 if trial else self._limits.per_server

    def _set_alarm(self, now: float) -> None:
        """Look again when a server may be asked again; until then only a place given back changes anything."""
        changes = [at for server in self.all for at in (server.aside_until, server.not_before) if at > now]
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if changes:
            self._alarm = asyncio.get_running_loop().call_at(min(changes), self._hand_out)


def _now() -> float:
    return asyncio.get_running_loop().time()
