"""What computes, and what is told of its time."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rollyard.types import (
    Activity,
    Interval,
)

if TYPE_CHECKING:
    pass

T = TypeVar("T")


class Spans(Protocol):
    """What one device did, and when. Anybody on any thread of its process may add to it; one drains it."""

    def now(self) -> int:
        """Nanoseconds on the monotonic clock."""
        ...

    def add(self, activity: Activity, start_ns: int, end_ns: int, what: str = "") -> None:
        """Something was done."""
        ...

    def doing(self, activity: Activity, what: str = "") -> AbstractContextManager[None]:
        """From entering the block to leaving it."""
        ...

    def timed(self, activity: Activity, call: Callable[..., T], what: str = "") -> Callable[..., T]:
        """`call`, which adds the time that it takes."""
        ...

    def drain(self) -> tuple[Interval, ...]:
        """What was added since the last time; at most so much that it fits into a message, so ask until there is none."""
        ...


class Device(Protocol):
    """One place where torch work runs, one call at a time. Trainer and engine of a colocated run share one."""

    @property
    def spans(self) -> Spans: ...

    async def run(self, call: Callable[..., T], *args: Any) -> T: ...


class Sink(Protocol):
    """Somewhere metrics go."""

    def write(self, record: dict[str, object]) -> None: ...

    def close(self) -> None: ...
