"""A sink on a thread of its own that is told, with each step, what phases there were since the last one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

from rollyard.protocols.devices import Sink, Tracked
from rollyard.watch.aside import Aside, Tell
from rollyard.watch.timeline import Interval, Timeline

PHASES: Final = "phases"  # of a record: those of `Phases`


@dataclass(frozen=True, slots=True)
class Phases:
    """Of a time, in nanoseconds of the world's clock. The intervals are measured from `origin_ns`."""

    start_ns: int
    end_ns: int
    origin_ns: int
    intervals: tuple[Interval, ...]


class Phased(Aside):
    """Adds the phases to records, and to the summary, where the run is: all else is done on the thread.

    Args:
        name: of the sink.
        make: the sink.
        timeline: of the run.
    """

    def __init__(self, name: str, make: Callable[[Tell], Sink], timeline: Timeline) -> None:
        super().__init__(name, make)
        self._timeline = timeline

    def open(self, run: Tracked) -> str:
        """Phases count from now on."""
        self._since = self._timeline.spans.now()
        self._shift = time.time_ns() - self._since  # from the run's clock to that of the world
        return super().open(run)

    def write(self, record: Mapping[str, object]) -> None:
        """The metrics of a step."""
        super().write({**record, PHASES: self._phases()})

    def close(self, summary: Mapping[str, object], failed: bool) -> None:
        """Likewise."""
        super().close({**summary, PHASES: self._phases()}, failed)

    def _phases(self) -> Phases:
        before, self._since = self._since, self._timeline.spans.now()
        start, shift = self._timeline.bounds_ns[0], self._shift
        ended = takewhile(lambda each: start + each.end_ns > before, reversed(self._timeline.intervals))
        return Phases(before + shift, self._since + shift, start + shift, tuple(ended)[::-1])
