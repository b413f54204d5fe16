"""The inline runtime: one process. A device is one thread, so that what runs on it runs in turn.

Trainer and engine of a colocated run share the thread: no forward pass can fall into an optimizer step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rollyard.watch.spans import SpanLog

T = TypeVar("T")


class DeviceThread:
    """One thread for all torch work of one device (protocols.Device).

    Args:
        prepare: called once on the thread before anything else, such as setting the number of CPU threads.
    """

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self.spans = SpanLog()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="device", initializer=prepare)

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run `call(*args)` on the thread. A call that has begun is not interrupted, also when this one is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *args)

    def close(self) -> None:
        """Let the thread end after what it is doing; what waits is given up."""
        self._executor.shutdown(wait=True, cancel_futures=True)
