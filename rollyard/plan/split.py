"""So many devices, and who gets which (PURE): options of `place` that `--gpus` stands for."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from rollyard.errors import ConfigError
from rollyard.plan.scenario import Scenario

FORM: Final = re.compile(r"([0-9]{1,9})(?:x(\S+))?")
WHERE: Final = "--gpus"
SIZES: Final = ("place.generate", "place.train", "engine.tensor_parallel_size")
HALF: Final = 0.5


def gpus_of(text: str) -> tuple[int, str]:
    """How many, and of which kind (empty: not said). Example: gpus_of("64xH100") == (64, "H100").

    Raises:
        ConfigError: it says something else.
    """
    found = FORM.fullmatch(text)
    if found is None or not int(found[1]):
        raise ConfigError(f"{text!r} is no number of devices", where=WHERE, remedy="give such as 64, or 64xH100")
    return int(found[1]), found[2] or ""


def split(devices: int, scenario: Scenario, given: Collection[str], *, share: float = HALF) -> dict[str, int]:
    """Sizes by option, such that all devices are used.

    Args:
        scenario: the other options.
        given: sizes that stand as they are.
        share: of the devices that generate, where engines have devices of their own and the other sizes do not fit.

    Raises:
        ConfigError: what is given leaves devices over, or needs more.
    """
    if scenario.place.apart:
        return _apart(devices, scenario, given, share)
    found = _halves if scenario.place.placement == "swap" else _colocated
    return {name: 1 for name in ("place.generate", "place.train") if name not in given} | found(devices, scenario, given)


def share_of(scenario: Scenario) -> float:
    """Of its devices, those that generate, where engines have devices of their own."""
    generate = scenario.place.generate * scenario.engine.tensor_parallel_size
    return generate / (generate + scenario.place.train)


def _colocated(devices: int, scenario: Scenario, given: Collection[str]) -> dict[str, int]:
    each = scenario.engine.tensor_parallel_size
    if devices % each:
        problem = f"{devices} devices are not shared out in engines of {each}"
        raise ConfigError(problem, where=WHERE, remedy=f"use {_near(devices, each)}, or another engine.tensor_parallel_size")
    if "place.train" in given and scenario.place.train * each != devices:
        problem = f"{scenario.place.train} x {each} devices are not {devices}"
        raise ConfigError(problem, where="place.train", remedy=f"leave it out, or use {devices // each}")
    return {"place.train": devices // each}


def _halves(devices: int, scenario: Scenario, given: Collection[str]) -> dict[str, int]:
    each = scenario.engine.tensor_parallel_size
    if devices % 2:
        raise ConfigError(f"{devices} devices have no two halves", where=WHERE, remedy=f"use {devices + 1}")
    if "engine.tensor_parallel_size" in given and 2 * each != devices:
        problem = f"two halves of {each} devices each are not {devices}"
        raise ConfigError(problem, where="engine.tensor_parallel_size", remedy=f"use {2 * each} devices, or another placement")
    return {"engine.tensor_parallel_size": devices // 2}


def _apart(devices: int, scenario: Scenario, given: Collection[str], share: float) -> dict[str, int]:
    each, engines, train = scenario.engine.tensor_parallel_size, scenario.place.generate, scenario.place.train
    if devices <= each:
        problem = f"one engine of {each} and one device that trains are more than {devices}"
        raise ConfigError(problem, where=WHERE, remedy=f"use {each + 1} or more, or placement colocated")
    if {"place.generate", "place.train"} <= set(given):
        if engines * each + train != devices:
            problem = f"{engines} engines of {each} and {train} devices that train are not {devices}"
            raise ConfigError(problem, where=WHERE, remedy=f"use {engines * each + train}, or leave out one of them")
    elif "place.generate" in given:
        train = devices - engines * each
        if train < 1:
            problem = f"{engines} engines of {each} leave none of {devices} devices to train"
            raise ConfigError(problem, where="place.generate", remedy=f"use at most {(devices - 1) // each}")
    elif "place.train" in given:
        rest = devices - train
        if rest < each or rest % each:
            problem = f"{rest} of {devices} devices remain, and an engine has {each}"
            raise ConfigError(problem, where="place.train", remedy="use another number, or another engine.tensor_parallel_size")
        engines = rest // each
    elif engines * each + train != devices:
        engines = min(max(1, round(devices * share / each)), (devices - 1) // each)
        train = devices - engines * each
    return {"place.generate": engines, "place.train": train}


def _near(devices: int, each: int) -> str:
    below = devices // each * each
    return f"{below} or {below + each}" if below else str(each)
