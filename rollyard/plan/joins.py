"""Engines that come and go while a simulated run goes on (PURE)."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from rollyard.errors import ConfigError
from rollyard.plan.scenario import Scenario

FORM: Final = re.compile(r"([0-9]{1,9}):([+-])([0-9]{1,9})")
WHERE: Final = "failures.joins"
EXAMPLE: Final = "give such as 20:+8, or 20:+8,60:-4"


class Join(NamedTuple):
    """Once `steps` batches are trained, so many engines come, or (below 0) leave."""

    steps: int
    engines: int


def joins_of(scenario: Scenario) -> tuple[Join, ...]:
    """In the order in which they happen.

    Raises:
        ConfigError: one is not of the form STEP:+N or STEP:-N, comes after the run's end, or leaves no engine.
    """
    found = [_join(text.strip(), scenario.run.steps) for text in scenario.failures.joins]
    if found and not scenario.place.apart:
        problem = f"with placement {scenario.place.placement} every engine shares a trainer's devices, and none comes or goes"
        raise ConfigError(problem, where=WHERE, remedy="use placement separate or async, or leave it out")
    found.sort(key=lambda join: join.steps)
    engines = scenario.place.generate
    for join in found:
        engines += join.engines
        if engines < 1:
            problem = f"{-join.engines} engines leave after step {join.steps}, and {engines - join.engines} are there"
            raise ConfigError(problem, where=WHERE, remedy="leave at least one")
    return tuple(found)


def _join(text: str, steps: int) -> Join:
    found = FORM.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} is not STEP:+N or STEP:-N", where=WHERE, remedy=EXAMPLE)
    step, engines = int(found[1]), int(found[2] + found[3])
    if not engines:
        raise ConfigError(f"{text!r} is no engine", where=WHERE, remedy=EXAMPLE)
    if not 0 < step < steps:
        problem = f"{text!r} is after step {step} of a run of {steps}"
        raise ConfigError(problem, where=WHERE, remedy=f"use a step from 1 to {steps - 1}" if steps > 1 else "add --run.steps")
    return Join(step, engines)
