"""Other processes, and lines to them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    pass


class Channel(Protocol):
    """A line to another process. Both ends may call; whoever hears of the end of the other fails what is open."""

    def handle(self, name: str, handler: Callable[[bytes], Awaitable[bytes]]) -> None:
        """Answer calls of this name."""

    def ready(self) -> None:
        """All handlers are there. Calls that came before are answered now."""

    async def call(self, name: str, content: bytes = b"", *, limit_s: float) -> bytes:
        """The answer. Raises what the other end raised, TimeLimitExceeded, or EngineLost when that is gone."""
        ...

    def tell(self, name: str, content: bytes = b"") -> None:
        """A call without an answer."""

    async def ended(self) -> str:
        """Wait for the end of the other side: what is known about the cause."""
        ...

    async def close(self) -> None: ...


class Process(Channel, Protocol):
    """A channel to a process that may be ended at any moment."""

    def kill(self) -> None:
        """At once, with all that it started, also when it stands still. It is to be closed all the same. Killing it twice is
        harmless."""
        ...


class Launcher(Protocol):
    """Starts hosts: other processes, each with a channel to this one."""

    async def launch(
        self, target: str, order: bytes, *, name: str, environment: Mapping[str, str], python: Path | None = None
    ) -> Process:
        """Start a host that runs `target`, the `module:function` of a coroutine function of its channel and `order`.

        Args:
            name: for messages.
            environment: its variables.
            python: its interpreter; this one when None.

        Raises EngineLost when it cannot be started.
        """
        ...

    async def close(self) -> None:
        """End what it started."""
        ...
