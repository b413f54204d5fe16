"""What computes, and what is told of its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rollyard.types import (
    Activity,
    Interval,
)

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


@dataclass(frozen=True, slots=True)
class Tracked:
    """What a sink is told of the run that it is to follow."""

    name: str
    folder: Path  # of the run
    project: str  # what the run belongs to, where a tracker keeps several
    config: Mapping[str, object]  # the resolved options, in sections
    again: bool = False  # it had lives before this one
    begins: int = 0  # steps that they did, as far as they are not done again
    earlier: Sequence[Mapping[str, object]] = ()  # metrics of these steps
    id: str = ""  # what the run is called there since an earlier life; empty: it is new there


class Sink(Protocol):
    """Somewhere metrics go. Whatever it raises, and however long it takes, `watch.aside` keeps from the run."""

    @property
    def takes_back(self) -> bool:
        """Once a later life of the run opens it, what it was told of steps that are done again is gone."""
        ...

    def open(self, run: Tracked) -> str:
        """Before anything is written. Returns what the run is called there: its next life is given that."""
        ...

    def write(self, record: Mapping[str, object]) -> None:
        """The metrics of a step, see docs/metrics.md."""
        ...

    def evaluated(self, record: Mapping[str, object]) -> None:
        """Those of an evaluation, which belongs to the `step` that made its version."""
        ...

    def close(self, summary: Mapping[str, object], failed: bool) -> None:
        """The run has ended: what it came to."""
        ...
