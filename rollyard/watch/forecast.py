"""What was expected of a step, beside what happened: the forecast that a run's config carries, and the same measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

from rollyard.config import ForecastConfig
from rollyard.watch.devices import DeviceTime, PoolTime, account
from rollyard.watch.timeline import PhaseSeconds
from rollyard.watch.trace import Traced

PHASES: Final = ("generate", "score", "train", "sync", "checkpoint")  # those of a forecast
BUSY: Final = {"engine_busy": "engine", "trainer_busy": "trainer"}  # the role of each
EXACT: Final = 1e-5  # of a step: numbers of a forecast have six digits, and what their sum leaves below that is none


@dataclass(frozen=True, slots=True)
class Compared:
    """One number. `ratio` is measured / forecast; None where there is no measurement, or nothing was forecast to take no time."""

    name: str  # as in ForecastConfig; rest_s: what no phase of the forecast has
    forecast: float
    measured: float | None
    ratio: float | None

    @classmethod
    def of(cls, name: str, forecast: float, measured: float | None) -> Self:
        return cls(name, forecast, measured, measured / forecast if forecast and measured is not None else None)


@dataclass(frozen=True, slots=True)
class Forecast:
    """The rows in the order of ForecastConfig. `steps` were measured: those of the last life but its first, if it has others."""

    source: str
    steps: int
    rows: tuple[Compared, ...]


class StepMeans:
    """Means over steps, without the first: it fills a pipeline, and makes acquaintance with kernels and caches.

    Where there is no other, it is all that there is.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._first: tuple[PhaseSeconds, int] | None = None
        self._phases = PhaseSeconds()
        self._tokens = 0

    def add(self, phases: PhaseSeconds, tokens: int) -> None:
        """One more step: its seconds, and the tokens that it trained on."""
        if self._first is None:
            self._first = (phases, tokens)
            return
        self._steps += 1
        self._tokens += tokens
        self._phases = PhaseSeconds(*(getattr(self._phases, f.name) + getattr(phases, f.name) for f in fields(PhaseSeconds)))

    @property
    def steps(self) -> int:
        """How many the means are of."""
        return self._steps or int(self._first is not None)

    def means(self) -> Mapping[str, float]:
        """As in ForecastConfig, and `rest_s`, which no phase of a forecast has. Empty before a step."""
        if self._first is None:
            return {}
        phases, tokens = (self._phases, self._tokens) if self._steps else self._first
        parts = {f"{name}_s": seconds / self.steps for name, seconds in phases.parts().items() if name in PHASES}
        rate = tokens / phases.wall_s if phases.wall_s else 0.0
        step_s = phases.wall_s / self.steps
        return {"step_s": step_s, **parts, "rest_s": max(step_s - sum(parts.values()), 0.0), "trained_tokens_per_s": rate}


def counted(traced: Traced, first: int = 1) -> tuple[tuple[DeviceTime, ...], tuple[PoolTime, ...]]:
    """The accounts of devices and roles over the steps that `StepMeans` is of: to the end of the last, without `first` steps.

    Where there are no more than these, from the start; at least one was done.
    """
    marks = traced.marks
    since_ns = marks[first - 1].at_ns if len(marks) > first else traced.start_ns
    driver, *devices = traced.lanes
    return account(devices, driver.intervals, since_ns, marks[-1].at_ns)


def busy(pools: Sequence[PoolTime], slots: float) -> Mapping[str, float]:
    """`engine_busy`, `trainer_busy`, where there are such, and `slots_busy`."""
    shares = {pool.role: pool.busy_share for pool in pools}
    return {name: shares[role] for name, role in BUSY.items() if role in shares} | {"slots_busy": slots}


def compare(expected: ForecastConfig, steps: int, measured: Mapping[str, float]) -> Forecast | None:
    """None where there is no forecast."""
    if not expected.step_s:
        return None
    rows = []
    for name, value in expected.model_dump(exclude={"source"}).items():
        rows.append(Compared.of(name, value, measured.get(name)))
        if name == f"{PHASES[-1]}_s":
            told = sum(getattr(expected, f"{phase}_s") for phase in PHASES)
            left = expected.step_s - told
            rows.append(Compared.of("rest_s", left if left > EXACT * expected.step_s else 0.0, measured.get("rest_s")))
    return Forecast(expected.source, steps, tuple(rows))
