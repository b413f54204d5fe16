"""What a benchmark found: typed records, one `Result` a benchmark, that become one line of JSON."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

LIBRARIES = ("rollyard", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Figure:
    """One more number beside the one that is compared. Example: Figure("slots busy", 0.92)."""

    name: str
    value: float
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Spread:
    """The middle and the ends of some numbers."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Measured:
    """One round of one side, in the result's unit."""

    value: float
    figures: tuple[Figure, ...] = ()


@dataclass(frozen=True, slots=True)
class Side:
    """All rounds of one side. `figures` are medians over the rounds."""

    name: str
    values: tuple[float, ...]  # [rounds]
    spread: Spread
    figures: tuple[Figure, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)  # empty: those of the result

    @classmethod
    def of(
        cls, name: str, rounds: Sequence[Measured], extra: Iterable[Figure] = (), versions: Mapping[str, str] | None = None
    ) -> Side:
        values = tuple(measured.value for measured in rounds)
        return cls(name, values, Spread.of(values), (*_medians(rounds), *extra), versions or {})


@dataclass(frozen=True, slots=True)
class Load:
    """The machine's load average of the last minute around one round."""

    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Difference:
    """Where greedy tokens part: the prompt, the place in its completion, and how nearly the two tokens tie.

    `gap` is how much likelier the model in float32 finds the one than the other, in nats.
    """

    prompt: int
    token: int
    gap: float


@dataclass(frozen=True, slots=True)
class Agreement:
    """Greedy tokens of both sides: `agreed` of `tokens` were written before each prompt's first difference."""

    tokens: int
    agreed: int
    differences: tuple[Difference, ...] = ()


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    features: tuple[str, ...]  # instruction sets that matrix products use
    memory_gib: float
    system: str


@dataclass(frozen=True, slots=True)
class Result:
    """One benchmark. A ratio above 1 means that the first side is better; one a round, against the second side."""

    bench: str
    workload: str
    model: str
    dtype: str
    threads: int
    unit: str  # "tokens/s", "s" or "ms"
    sides: tuple[Side, ...]
    ratios: tuple[float, ...]  # [rounds]
    ratio: Spread
    loads: tuple[Load, ...]  # [rounds]
    machine: Machine
    versions: Mapping[str, str]
    agreement: Agreement | None = None
    options: Mapping[str, object] = field(default_factory=dict)  # of the config that are not the default


def ratios(unit: str, first: Sequence[float], second: Sequence[float]) -> tuple[float, ...]:
    """How many times better the first side was, round by round: more tokens a second, or less time."""
    pairs = zip(first, second, strict=True)
    return tuple(ours / theirs if unit == "tokens/s" else theirs / ours for ours, theirs in pairs)


def machine() -> Machine:
    """This machine, as far as Linux tells."""
    about = _cpu()
    wanted = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16")
    features = tuple(name for name in wanted if name in about.get("flags", about.get("Features", "")).split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    family = f"family {about['cpu family']} model {about['model']}" if "cpu family" in about else ""
    cpu = " ".join(part for part in (about.get("model name") or platform.machine(), family) if part)
    return Machine(cpu, os.cpu_count() or 1, features, round(memory, 1), f"{platform.system()} {platform.release()}")


def versions() -> dict[str, str]:
    """Of this process's side."""
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in LIBRARIES}}


def _cpu() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(encoding="utf-8").split("\n\n")[0]
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}


def _medians(rounds: Sequence[Measured]) -> tuple[Figure, ...]:
    """Every figure that each round has."""
    return tuple(
        Figure(figure.name, statistics.median(measured.figures[place].value for measured in rounds), figure.unit)
        for place, figure in enumerate(rounds[0].figures)
    )
