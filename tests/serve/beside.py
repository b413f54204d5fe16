"""A service on a thread of its own, for clients that block."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tests.serve.double import batch, group, serving
from tests.serve.test_guard import listening


class Beside:
    """A service on a thread of its own, which goes on with batches and members meanwhile."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port = 0
        self._up, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> Beside:
        self._thread.start()
        assert self._up.wait(20)
        return self

    def __exit__(self, *about: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as closing:
            options: dict[str, Any] = {"serve__wait_s": 0.2, "serve__episodes": True, "serve__body_s": 5}
            served = await closing.enter_async_context(serving(self._folder, token="", room=10**6, **options))
            self.port = await closing.enter_async_context(listening(served))
            served.run.found.put_nowait(group(1))
            served.run.batch.put_nowait(batch(0, 1))
            self._up.set()
            while not self._stop.is_set():
                served.run.admit(4)
                await asyncio.sleep(0.05)
