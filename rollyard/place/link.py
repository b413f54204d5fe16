"""A line between two processes over a socket: each frame after its length (4 bytes)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rollyard.place.line import FLUSH_S, LIMIT, SIZE, Line, nothing


class Link(Line):
    """One end. `open` starts reading.

    Args:
        name: of the other end, for messages.
        reader, writer: the socket.
        find_cause: once the other end is gone, finds out why.
        said: what the other end printed last, for messages.
    """

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        find_cause: Callable[[], Awaitable[str]] | None = None,
        said: Callable[[], str] = nothing,
    ) -> None:
        super().__init__(name, said)
        self._reader, self._writer, self._find_cause = reader, writer, find_cause
        self._deliver: Callable[[bytes], None] = self.take
        self._reading: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin to read. Handlers should be there by now."""
        self._reading = asyncio.create_task(self._read(), name=f"link {self.name}")

    def pass_on(self, deliver: Callable[[bytes], None]) -> Callable[[bytes], None]:
        """Hand frames to `deliver` as they come, instead of acting on them. Returns what sends frames to the other end."""
        self._deliver = deliver
        return lambda frame: self._post(b"", frame)

    async def close(self) -> None:
        """Send what is still to be sent, and let go of the socket. Closing twice is harmless."""
        await self._cancel(self._reading, *self._tasks)
        self.fail("was closed")
        self._writer.close()
        try:
            async with asyncio.timeout(FLUSH_S):
                await self._writer.wait_closed()
        except TimeoutError:  # the other end is there and does not read
            self._writer.transport.abort()
        except ConnectionError:
            pass

    async def _read(self) -> None:
        try:
            while True:
                size = SIZE.unpack(await self._reader.readexactly(SIZE.size))[0]
                if size > LIMIT:
                    self.fail(f"sent what is no message: {size} bytes are more than {LIMIT}")
                    return
                frame = await self._reader.readexactly(size)
                self._deliver(frame)
        except ValueError:
            pass  # the line has failed with it
        except (asyncio.IncompleteReadError, ConnectionError):
            self.fail("ended" if self._find_cause is None else await self._find_cause())

    def _post(self, head: bytes, content: bytes) -> None:
        if not self._writer.is_closing():
            self._writer.write(SIZE.pack(len(head) + len(content)) + head + content)
