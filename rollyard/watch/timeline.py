"""Where the wall clock went: each moment of the main timeline belongs to one phase, or is unaccounted for.

Several phases may be open at once; the moment then goes to the one that comes first in `Phase`. So time hidden behind
another phase is not counted twice, and the sum of all phases and the unaccounted rest is the wall time, exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import NamedTuple

from rollyard.watch.spans import SpanLog, coarser


class Phase(StrEnum):
    """What a run does, the one that takes the time first. Generation hides scoring; setup gives way to all it contains."""

    TRAIN = "train"
    SYNC = "sync"
    CHECKPOINT = "checkpoint"
    EVAL = "eval"
    GENERATE = "generate"
    TOOLS = "tools"
    SCORE = "score"
    SETUP = "setup"


class Interval(NamedTuple):
    """A phase was open from `start_ns` to `end_ns`, measured from the timeline's start. Intervals may overlap."""

    phase: Phase
    start_ns: int
    end_ns: int


MOST = 2**14  # intervals that are kept: beyond, the shortest gaps within a phase are closed
BESIDE = ("generating_s", "scoring_s", "scoring_hidden_s", "driver_s", "driver_generating_s")


@dataclass(frozen=True, slots=True)
class PhaseSeconds:
    """Seconds of the main timeline. Each is measured; only `unaccounted_s` is what the others leave of `wall_s`.

    Beside them stand, whatever else was done meanwhile: `generating_s`, an engine held a request of the run; `scoring_s`, a
    verdict was awaited; `scoring_hidden_s`, both at once; `driver_s`, processor time of the driver's own thread, 0 where
    nobody measures it; and `driver_generating_s`, that of it in which an engine held a request.
    """

    wall_s: float = 0.0
    generate_s: float = 0.0
    tools_s: float = 0.0
    score_s: float = 0.0
    train_s: float = 0.0
    sync_s: float = 0.0
    eval_s: float = 0.0
    checkpoint_s: float = 0.0
    setup_s: float = 0.0
    unaccounted_s: float = 0.0
    generating_s: float = 0.0
    scoring_s: float = 0.0
    scoring_hidden_s: float = 0.0
    driver_s: float = 0.0
    driver_generating_s: float = 0.0

    def since(self, earlier: PhaseSeconds) -> PhaseSeconds:
        """What came after `earlier` on the same timeline."""
        return PhaseSeconds(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def parts(self) -> dict[str, float]:
        """Seconds by phase name, `unaccounted` last; they add up to `wall_s`."""
        return {f.name.removesuffix("_s"): getattr(self, f.name) for f in fields(self)[1 : -len(BESIDE)]}

    def beside(self) -> dict[str, float]:
        """Seconds of what may go on at the same time as a phase, by name."""
        return {name: getattr(self, name) for name in BESIDE}


class Timeline:
    """Phase accounting. Starts when made.

    Args:
        clock: nanoseconds that never go back; for the accounts of devices those of the monotonic clock.
        driver: nanoseconds of processor time that the calling thread has taken so far.
    """

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns, driver: Callable[[], int] = lambda: 0) -> None:
        self._clock, self._driver = clock, driver
        self._driven = driver()
        self.spans = SpanLog(clock)  # what the driver does besides, and no phase tells: see `watch.accounts`
        self._start = self._since = clock()
        self._depth = dict.fromkeys(Phase, 0)
        self._opened = dict.fromkeys(Phase, 0)
        self._parts = dict.fromkeys(Phase, "")
        self._spent = dict.fromkeys(Phase, 0)
        self._beside = dict.fromkeys(BESIDE, 0)
        self._intervals: list[Interval] = []
        self.generation = 0  # of the intervals: how often they were made anew

    def open(self, phase: Phase) -> None:
        """The phase begins. It may be opened again before it is closed; it ends with the last close."""
        if not self._depth[phase]:  # else nothing changes in whose the moment is, and requests come by the thousand
            self._opened[phase] = self._advance()
        self._depth[phase] += 1

    def close(self, phase: Phase) -> None:
        """Raises ValueError when the phase is not open."""
        if not self._depth[phase]:
            raise ValueError(f"phase {phase} is not open")
        if self._depth[phase] == 1:
            now = self._advance()
            self._intervals.append(Interval(phase, self._opened[phase] - self._start, now - self._start))
            if len(self._intervals) > MOST:
                self._intervals = coarser(self._intervals, MOST // 2, lambda interval: interval.phase)
                self.generation += 1
        self._depth[phase] -= 1

    def end(self) -> None:
        """Whatever is open is closed."""
        for phase, depth in self._depth.items():
            for _ in range(depth):
                self.close(phase)

    @contextmanager
    def phase(self, phase: Phase, part: str = "") -> Iterator[None]:
        """`part` is the name of what goes on in it, for people."""
        self.open(phase)
        if part:
            self._parts[phase] = part
        try:
            yield
        finally:
            if part:
                self._parts[phase] = ""
            self.close(phase)

    @property
    def current(self) -> Phase | None:
        """The phase that the present moment goes to."""
        return next((phase for phase in Phase if self._depth[phase]), None)

    @property
    def activity(self) -> str:
        """The same in words, such as `sync (canary)`; empty where there is none."""
        phase = self.current
        if phase is None:
            return ""
        return f"{phase} ({part})" if (part := self._parts[phase]) else str(phase)

    @property
    def bounds_ns(self) -> tuple[int, int]:
        """The start, and the moment up to which `seconds` last gave accounts."""
        return self._start, self._since

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """Phases that have ended, in the order they ended; where they were very many, with short gaps closed."""
        return tuple(self._intervals)

    def seconds(self) -> PhaseSeconds:
        """The accounts so far, phases that are open included."""
        now = self._advance()
        wall = now - self._start
        spent = {f"{phase}_s": nanoseconds / 1e9 for phase, nanoseconds in self._spent.items()}
        left = wall - sum(self._spent.values())
        beside = {name: nanoseconds / 1e9 for name, nanoseconds in self._beside.items()}
        return PhaseSeconds(wall_s=wall / 1e9, unaccounted_s=left / 1e9, **spent, **beside)

    def _advance(self) -> int:
        """Give the time since the last change to the phase it belongs to."""
        now, driven = self._clock(), self._driver()
        if now == self._since and driven == self._driven:
            return now  # several phases change at one moment of a simulation
        phase = self.current
        if phase is not None:
            self._spent[phase] += now - self._since
        generating, scoring = self._depth[Phase.GENERATE] > 0, self._depth[Phase.SCORE] > 0
        for name, going in zip(BESIDE, (generating, scoring, generating and scoring), strict=False):
            self._beside[name] += (now - self._since) * going
        self._beside["driver_s"] += driven - self._driven
        self._beside["driver_generating_s"] += (driven - self._driven) * generating
        self._since, self._driven = now, driven
        return now
