"""Spans of steps, and of the phases in them, to whatever tracer provider the program has. Without one nothing is made.

A provider has a queue and a thread of its own, and its interface raises nothing: no thread of ours is needed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from importlib import metadata
from itertools import takewhile
from typing import Final

from opentelemetry import trace
from opentelemetry.trace import Span, StatusCode, TracerProvider

from rollyard.protocols.devices import Tracked
from rollyard.watch.spans import coarser
from rollyard.watch.timeline import Interval, Timeline

MOST: Final = 128  # phases of a step that are told: of more, the shortest gaps within a phase are closed
TOLD: Final = ("reward_mean", "tokens", "dropped", "incarnation")  # of a step's metrics


class OpenTelemetrySink:
    """A trace for each step: its span, and below it one for each phase. What is done again is there again.

    Args:
        timeline: of the run.
        provider: instead of the program's own.
    """

    takes_back = True

    def __init__(self, timeline: Timeline, provider: TracerProvider | None = None) -> None:
        self._timeline, self._provider = timeline, provider or trace.get_tracer_provider()

    def open(self, run: Tracked) -> str:
        if isinstance(self._provider, trace.ProxyTracerProvider):
            remedy = "run it with `opentelemetry-instrument`, or set a tracer provider"
            warnings.warn(f"opentelemetry: nobody in this program takes spans: {remedy}", RuntimeWarning, stacklevel=2)
        self._tracer, self._run = self._provider.get_tracer("rollyard", metadata.version("rollyard")), run.name
        self._since = self._timeline.spans.now()
        self._shift = time.time_ns() - self._since  # from the run's clock to that of the world
        return ""

    def write(self, record: Mapping[str, object]) -> None:
        values = {f"rollyard.{name}": value for name in TOLD if isinstance(value := record.get(name), int | float)}
        self._span("step", {"rollyard.step": int(str(record["step"])), **values}).end(self._since + self._shift)

    def evaluated(self, record: Mapping[str, object]) -> None:
        """It is a phase."""

    def close(self, summary: Mapping[str, object], failed: bool) -> None:
        """What came after the last step."""
        span = self._span("end", {"rollyard.cause": str(summary["run/cause"])})
        if failed:
            span.set_status(StatusCode.ERROR, str(summary["run/cause"]))
        span.end(self._since + self._shift)

    def _span(self, name: str, values: Mapping[str, int | float | str]) -> Span:
        """Of what was done since the last one. It is open: its end is now `_since`."""
        before, self._since = self._since, self._timeline.spans.now()
        told = {"rollyard.run": self._run, **values}
        span = self._tracer.start_span(name, start_time=before + self._shift, attributes=told)
        if span.is_recording():
            start, within = self._timeline.bounds_ns[0], trace.set_span_in_context(span)
            ended = takewhile(lambda each: start + each.end_ns > before, reversed(self._timeline.intervals))
            for phase, begin, end in coarser(list(ended)[::-1], MOST, _phase):
                part = self._tracer.start_span(str(phase), within, start_time=start + begin + self._shift)
                part.end(start + end + self._shift)
        return span


def _phase(interval: Interval) -> str:
    return interval.phase
