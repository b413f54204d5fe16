"""The faults that a file names: what is done to which process, and when."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from rollyard import events, fitness, lives, turns
from rollyard.config import Count, Natural, Positive, Section
from rollyard.errors import ConfigError

What = Literal["kill", "stall", "slow", "corrupt"]
How = Literal["short", "vocabulary", "version"]
KINDS = ("engine", "trainer", "reward", "environment", "actor", "run")  # of processes
ALL_EVENTS = frozenset(
    name
    for module in (events, turns, lives, fitness)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and issubclass(kind, events.Event | events.Instruction)
) - {"Event", "Instruction"}
WHENS = ("step", "after_s", "event", "per_minute")


class Fault(Section):
    """One fault. Exactly one of `step`, `after_s`, `event` and `per_minute` says when it happens.

    Example: Fault(what="kill", which="engine", step=3).
    """

    what: What
    which: Annotated[str, Field(min_length=1)]  # a kind of process, or the name of one
    step: Count | None = None  # as soon as so many steps are trained
    after_s: Positive | None = None  # seconds of the run's life, and again after each so many
    event: str = ""  # the name of what the run's core hears or says
    count: Count = 1  # at each so many of them
    per_minute: Positive | None = None  # at random, so often on average
    times: Count = 1  # at most, over all lives of the run
    for_s: Positive | None = None  # how long it lasts, where it lasts
    factor: Annotated[float, Field(gt=1)] | None = None  # how much slower
    how: How | None = None  # answers are corrupted
    seed: Natural = 0  # of what is drawn: who is hit of several, and when

    def told(self) -> str:
        """In words. Example: "kill engine"."""
        lasts = "" if self.for_s is None else f" for {self.for_s:g} s"
        return f"{self.what} {self.which}{lasts}"


def read_faults(path: Path) -> tuple[Fault, ...]:
    """The [[fault]] tables of a file. Raises ConfigError, which names the fault."""
    tables = _read(path).get("fault", [])
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise ConfigError("no fault is in it", where=str(path), remedy="begin each with [[fault]], see docs/chaos.md")
    return tuple(_fault(table, f"{path}: fault {number}") for number, table in enumerate(tables, 1))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), remedy="give a TOML file of faults") from None
    except (ValueError, RecursionError) as error:  # of TOML, and of UTF-8
        raise ConfigError(f"not valid TOML: {error}", where=str(path), remedy="see toml.io for the format") from None
    if extra := sorted(found.keys() - {"fault"}):
        raise ConfigError(f"{extra[0]!r} is no part of it", where=str(path), remedy="it has [[fault]] tables and nothing else")
    return found


def _fault(table: Mapping[str, Any], where: str) -> Fault:
    for name, value in table.items():
        if isinstance(value, bool):
            raise ConfigError(f"{value!r} does not fit", where=f"{where}: {name}", remedy="give a number or a text")
    try:
        fault = Fault.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"])
        known = f"one of: {', '.join(Fault.model_fields)}" if first["type"] == "extra_forbidden" else first["msg"].lower()
        problem = "it is missing" if first["type"] == "missing" else f"{first['input']!r} does not fit"
        raise ConfigError(problem, where=f"{where}: {name}", remedy=known) from None
    for found in _misfits(fault):
        name, problem, remedy = found
        raise ConfigError(problem, where=f"{where}: {name}", remedy=remedy)
    return fault


def _misfits(fault: Fault) -> Iterator[tuple[str, str, str]]:
    """What of a fault does not go together: option, problem, remedy."""
    whens = [name for name in WHENS if getattr(fault, name)]
    if len(whens) != 1:
        problem = f"{' and '.join(whens)} both say when" if whens else "nothing says when it happens"
        yield (whens[-1] if whens else "when"), problem, f"give one of {', '.join(WHENS)}"
    if fault.event and fault.event not in ALL_EVENTS:
        yield "event", f"there is no event {fault.event!r}", "give a name of docs/chaos.md, such as Scored"
    if fault.count > 1 and not fault.event:
        yield "count", "it counts events, and none is named", "give event too, or leave it out"
    if fault.step is not None and fault.times > 1:
        yield "times", "a step is trained once", 'leave it out, or give event = "BatchTrained"'
    needs = _NEEDS[fault.what]
    for name in ("for_s", "factor", "how"):
        given = getattr(fault, name) is not None
        if given and name not in needs:
            yield name, f"it is not for {fault.what}", "leave it out"
        if not given and name in needs:
            yield name, f"{fault.what} needs it", _REMEDIES[name]


_NEEDS: Mapping[str, tuple[str, ...]] = {
    "kill": (),
    "stall": ("for_s",),
    "slow": ("for_s", "factor"),
    "corrupt": ("for_s", "how"),
}
_REMEDIES = {"for_s": "give seconds", "factor": "give such as 10: ten times slower", "how": "short, vocabulary or version"}


def check_faults(faults: tuple[Fault, ...], there: Mapping[str, str], engines: Set[str], path: Path) -> None:
    """Raises ConfigError for a process that the run does not have.

    Args:
        there: kinds and names of processes, each with the reason why the run has none of its own, or "".
        engines: those of them whose answers can be corrupted.
    """
    for number, fault in enumerate(faults, 1):
        where, remedy = f"{path}: fault {number}: which", f"one of: {', '.join(name for name, why in there.items() if not why)}"
        if fault.which not in there:
            raise ConfigError(f"there is no process {fault.which!r}", where=where, remedy=remedy)
        if there[fault.which]:
            raise ConfigError(there[fault.which], where=where, remedy=remedy)
        if fault.what == "corrupt" and fault.which not in engines:
            raise ConfigError("only what engines answer can be corrupted", where=where, remedy=f"one of: {', '.join(engines)}")
