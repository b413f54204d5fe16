"""Verdicts of judges that cost: each question is asked once, by content, and its verdict kept."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable


class Cache:
    """Verdicts by question. Those who ask the same at the same time wait for one answer; a failure is not kept.

    Args:
        most: verdicts kept, the one that was used longest ago goes first. 0: none is, and each question is asked.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[bytes, float] = OrderedDict()
        self._asking: dict[bytes, asyncio.Task[float]] = {}

    async def verdict(self, question: str, ask: Callable[[], Awaitable[float]]) -> float:
        """What `ask` says, or what it said. Raises what it raises."""
        if not self._most:
            return await ask()
        key = hashlib.blake2b(question.encode(errors="surrogatepass"), digest_size=16).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        task = self._asking.get(key)
        if task is None:
            task = self._asking[key] = asyncio.create_task(self._asked(key, ask), name="verdict")
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever asked may have gone
        return await asyncio.shield(task)  # others may wait for it too

    async def close(self) -> None:
        """Give up what is being asked."""
        tasks = list(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _asked(self, key: bytes, ask: Callable[[], Awaitable[float]]) -> float:
        try:
            verdict = self._kept[key] = await ask()
        finally:
            del self._asking[key]
        if len(self._kept) > self._most:
            self._kept.popitem(last=False)
        return verdict
