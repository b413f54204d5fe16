"""Spans of steps, and of the phases in them, to whatever tracer provider the program has. Without one nothing is made."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Final

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode, TracerProvider

from rollyard.protocols.devices import Tracked
from rollyard.watch.aside import Tell
from rollyard.watch.spans import coarser
from rollyard.watch.timeline import Interval
from rollyard.watch.trackers.phased import PHASES, Phases

MOST: Final = 128  # phases of a step that are told: of more, the shortest gaps within a phase are closed
TOLD: Final = ("reward_mean", "tokens", "dropped", "incarnation")  # of a step's metrics


class OpenTelemetrySink:
    """A trace for each step: its span, and below it one for each phase. What is done again is there again.

    Args:
        tell: that nobody takes spans.
        provider: instead of the program's own.
    """

    takes_back = True

    def __init__(self, tell: Tell, provider: TracerProvider | None = None) -> None:
        self._tell, self._provider = tell, provider or trace.get_tracer_provider()

    def open(self, run: Tracked) -> str:
        if isinstance(self._provider, trace.ProxyTracerProvider):
            self._tell("nobody in this program takes spans: run it with `opentelemetry-instrument`, or set a tracer provider")
        self._tracer, self._run = self._provider.get_tracer("rollyard", metadata.version("rollyard")), run.name
        return ""

    def write(self, record: Mapping[str, object]) -> None:
        """A step of an earlier life, which has no phases any more, has no span."""
        values = {f"rollyard.{name}": value for name in TOLD if isinstance(value := record.get(name), int | float)}
        if isinstance(phases := record.get(PHASES), Phases):
            self._span("step", {"rollyard.step": int(str(record["step"])), **values}, phases).end(phases.end_ns)

    def evaluated(self, record: Mapping[str, object]) -> None:
        """It is a phase."""

    def close(self, summary: Mapping[str, object], failed: bool) -> None:
        """What came after the last step."""
        if isinstance(phases := summary.get(PHASES), Phases):
            span = self._span("end", {"rollyard.cause": str(summary["run/cause"])}, phases)
            if failed:
                span.set_status(StatusCode.ERROR, str(summary["run/cause"]))
            span.end(phases.end_ns)

    def _span(self, name: str, values: Mapping[str, int | float | str], phases: Phases) -> Span:
        """Of what was done in that time; it is open."""
        told = {"rollyard.run": self._run, **values}
        span = self._tracer.start_span(name, Context(), start_time=phases.start_ns, attributes=told)
        if span.is_recording():
            within = trace.set_span_in_context(span)
            for phase, begin, end in coarser(list(phases.intervals), MOST, _phase):
                part = self._tracer.start_span(str(phase), within, start_time=phases.origin_ns + begin)
                part.end(phases.origin_ns + end)
        return span


def _phase(interval: Interval) -> str:
    return interval.phase
