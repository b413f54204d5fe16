"""How much a client asks of its servers: the numbers, and the token bucket that holds to a rate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields

from rollyard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates count every try. Raises ConfigError for a number that is too small."""

    per_server: int = 64  # requests under way at one server, and connections to it
    requests_per_s: float = 0.0  # to all servers together; 0: no limit
    tokens_per_minute: float = 0.0  # of prompts and of what may be written, to all servers together; 0: no limit
    burst_s: float = 1.0  # seconds of unused allowance that are kept: t seconds see at most rate x (t + burst_s) and one request
    tries: int = 5  # of one call
    total_s: float = 600.0  # seconds of one call: waiting, all tries, and reading the answer
    silence_s: float = 300.0  # seconds without a byte after which a try is given up
    connect_s: float = 10.0  # seconds
    backoff_s: float = 0.5  # the wait before try n+1 is drawn between 0 and this times 2^(n-1), ...
    backoff_most_s: float = 30.0  # ... or this
    aside_s: float = 2.0  # seconds for which a server that failed is avoided; doubles with each failure in a row
    aside_most_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, may_be_0 = getattr(self, field.name), field.name in {"requests_per_s", "tokens_per_minute", "burst_s"}
            if not value >= 0 or (value == 0 and not may_be_0):
                remedy = "use 0 or more" if may_be_0 else "use more than 0"
                raise ConfigError(f"{value} does not fit", where=f"Limits.{field.name}", remedy=remedy)


class Bucket:
    """A token bucket that is always served in order. It may go into debt for one request larger than itself.

    Args:
        rate: tokens a second that flow in; 0: no limit.
        size: tokens it holds at most.
    """

    def __init__(self, rate: float, size: float) -> None:
        self._rate, self._size, self._level = rate, size, size
        self._filled_at: float | None = None

    async def take(self, amount: float) -> None:
        """Wait until all that was asked for earlier has flowed in, then take `amount`."""
        if not self._rate:
            return
        self._fill()
        wait_s = max(0.0, -self._level / self._rate)
        self._level -= amount
        try:
            if wait_s:
                await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            self._level += amount  # not used
            raise

    def charge(self, amount: float) -> None:
        """Take what turned out to be needed beyond what was taken before."""
        self._level -= amount if self._rate else 0.0

    def _fill(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._filled_at is not None:
            self._level = min(self._size, self._level + (now - self._filled_at) * self._rate)
        self._filled_at = now
