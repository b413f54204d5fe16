"""A line whose frames are fetched, all that wait at once, by whatever carries them as bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from rollyard.place.line import SIZE, Line, nothing

BATCH = 2**26  # bytes of a batch; one frame may have more


class Mailed(Line):
    """A line whose frames wait until somebody fetches them."""

    def __init__(self, name: str, said: Callable[[], str] = nothing) -> None:
        super().__init__(name, said)
        self._frames: deque[bytes] = deque()
        self._filled = asyncio.Event()

    def forward(self, frame: bytes) -> None:
        """Send a frame that somebody else made."""
        self._post(b"", frame)

    async def batch(self) -> bytes:
        """The frames that wait, at least one; each after its length."""
        await self._filled.wait()
        taken: list[bytes] = []
        size = 0
        while self._frames and (not taken or size + len(self._frames[0]) <= BATCH):
            taken.append(self._frames.popleft())
            size += len(taken[-1])
        if not self._frames:
            self._filled.clear()
        return b"".join(taken)

    def take_batch(self, batch: bytes) -> None:
        with suppress(ValueError):  # the line has failed with it
            for frame in split(batch):
                self.take(frame)

    def _post(self, head: bytes, content: bytes) -> None:
        self._frames.append(SIZE.pack(len(head) + len(content)) + head + content)
        self._filled.set()


def split(batch: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(batch):
        begin = at + SIZE.size
        at = begin + SIZE.unpack_from(batch, at)[0]
        yield batch[begin:at]
