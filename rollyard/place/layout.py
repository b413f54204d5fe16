"""Which roles go to which devices (PURE).

A host is one process with one device, or with the devices of one tensor-parallel engine: an engine, a trainer, or both with
one set of parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollyard.errors import ConfigError
from rollyard.events import EngineId

REWARD_MODEL = "reward-model"  # name of its host


@dataclass(frozen=True, slots=True)
class Host:
    """What one process has. `rank` is its trainer's place among the data-parallel ones, None without a trainer."""

    name: str
    devices: int
    engine: EngineId | None = None
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Roles:
    """How many of what a config asks for."""

    placement: str
    generate: int  # engines
    train: int  # data-parallel trainers
    tensor_parallel: int  # devices of one engine
    judges: int = 0  # models that judge, each on a device of its own


def layout(roles: Roles, available: int | None = None) -> tuple[Host, ...]:
    """The hosts of a run, engines first.

    Args:
        roles: what is asked for.
        available: devices there are; None where there is no such limit, as with processes on a CPU.

    Raises:
        ConfigError: naming the numbers that do not fit, and the nearest that do.
    """
    return (*_policy(roles, available), *(Host(REWARD_MODEL, 1) for _ in range(roles.judges)))


def _policy(roles: Roles, available: int | None) -> tuple[Host, ...]:
    """Those with the policy, in an engine or a trainer."""
    needed = devices(roles)
    if available is not None and needed > available:
        problem = f"placement {roles.placement} with {_shown(roles)} needs {needed} devices, and there are {available}"
        raise ConfigError(problem, where="place", remedy=_nearest(roles, available))
    if roles.placement in ("separate", "async"):
        engines = tuple(Host(f"engine-{n}", roles.tensor_parallel, engine=f"engine-{n}") for n in range(roles.generate))
        return (*engines, *(Host(f"trainer-{n}", 1, rank=n) for n in range(roles.train)))
    if roles.placement == "swap":
        return tuple(Host(f"half-{n}", 1, engine=f"engine-{n}", rank=0) for n in range(2))
    return tuple(Host(f"device-{n}", 1, engine=f"engine-{n}", rank=n) for n in range(roles.train))


def devices(roles: Roles) -> int:
    """How many devices it takes."""
    if roles.placement in ("separate", "async"):
        return roles.generate * roles.tensor_parallel + roles.train + roles.judges
    return (2 if roles.placement == "swap" else roles.train) + roles.judges


def _nearest(roles: Roles, available: int) -> str:
    """The layouts of the same placement that differ least and fit, else one that fits in any case."""
    if roles.judges and 0 < available <= roles.judges:
        return "use --place.placement colocated --place.train 1 --reward.model.place colocated"
    available = max(available - roles.judges, 0)
    if roles.placement in ("separate", "async"):
        most = available // roles.tensor_parallel
        fitting = [
            (generate, train)
            for generate in range(1, min(most, roles.generate) + 1)
            for train in range(1, min(available - generate * roles.tensor_parallel, roles.train) + 1)
        ]
        far = {each: roles.generate - each[0] + roles.train - each[1] for each in fitting}
        least = min(far.values(), default=0)
        near = [
            f"--place.generate {generate} --place.train {train}" for generate, train in fitting if far[generate, train] == least
        ]
        if near:
            return f"use {' or '.join(near)}"
    if roles.placement == "colocated" and available:
        return f"use --place.train {available}"
    return "use --place.placement colocated" if available else "use a machine that has one"


def _shown(roles: Roles) -> str:
    return f"{_shown_policy(roles)}{' and a reward model' * roles.judges}"


def _shown_policy(roles: Roles) -> str:
    if roles.placement in ("separate", "async"):
        size = f" of {roles.tensor_parallel} devices" if roles.tensor_parallel > 1 else ""
        return f"{roles.generate} engines{size} and {roles.train} trainers"
    return "2 halves" if roles.placement == "swap" else f"{roles.train} trainers"
