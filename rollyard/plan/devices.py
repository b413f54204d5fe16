"""Which devices a scenario has, and how they are tied together (PURE)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollyard.errors import ConfigError
from rollyard.plan.hardware import Hardware
from rollyard.plan.scenario import Scenario
from rollyard.plan.shape import Shape


@dataclass(frozen=True, slots=True)
class Devices:
    """How many of one kind do what."""

    hardware: Hardware
    engines: int
    tensor_parallel: int  # devices of one engine
    train: int  # devices that train together
    ranks: int  # parts that a batch is split in, each of whole sequences: pipelines, where training has stages
    copies: int  # devices that share one copy of parameters and their state
    apart: bool  # engines have devices of their own
    spread: bool = False  # hosts lie on a node each

    @property
    def nodes(self) -> int:
        """That the run lies on; more than one with `spread`, however few its devices are."""
        engines = self.engines * self.tensor_parallel
        found = nodes(engines + self.train if self.apart else engines, self.hardware.node)
        return max(found, 2) if self.spread else found

    def rate(self, together: int) -> float:
        """Bytes/s that each of `together` devices gets from the others, as NCCL's rings reach them at best.

        In a node that is its link. Between nodes a ring enters and leaves each node once, over all its network cards (NCCL tests,
        PERFORMANCE.md), so that every device sees as much as all cards of a node, and no more than its link.
        """
        hardware = self.hardware
        if together <= hardware.node:
            return hardware.link
        return min(hardware.link, hardware.nic * hardware.node)


def devices_of(scenario: Scenario, hardware: Hardware) -> Devices:
    """How `place` has them; with `colocated` and `swap` what generates also trains. Raises ConfigError."""
    place, size = scenario.place, scenario.engine.tensor_parallel_size
    apart = place.apart
    if apart:
        engines, train, ranks, sharing = place.generate, place.train, place.train, 1
    elif place.placement == "swap":
        engines, train, ranks, sharing = 2, size, 1, size
    else:
        engines, train, ranks, sharing = place.train, place.train * size, place.train, size
    copies = scenario.costs.state_devices or (train if scenario.train.shard else sharing)
    if train % copies:
        problem = f"{train} devices that train are no whole number of copies on {copies} devices each"
        raise ConfigError(problem, where="costs.state_devices", remedy=f"use a divisor of {train}, or 0")
    stages, each = scenario.costs.stages, scenario.costs.stage_devices
    together = stages * each if each else max(stages, train // ranks)
    if train % together:
        problem = f"{train} devices that train are no whole number of pipelines on {together} devices each"
        raise ConfigError(problem, where="costs.stages", remedy=f"use stages and stage_devices whose product divides {train}")
    ranks = train // together
    return Devices(hardware, engines, size, train, ranks, copies, apart, place.nodes == "spread")


def nodes(devices: int, node: int) -> int:
    """Nodes that so many devices fill."""
    return math.ceil(devices / node)


def check_heads(scenario: Scenario, shape: Shape) -> None:
    """Raises ConfigError where the heads of the model cannot be shared out among the devices of an engine.

    Each device has as many attention heads as another. It has as many heads of keys and values too; where there are fewer of them
    than devices, as many devices have the same one.
    """
    size = scenario.engine.tensor_parallel_size
    if _shared(shape, size):
        return
    sizes = engine_sizes(shape)
    problem = f"the {shape.heads} attention heads of {shape.name}, {shape.kv_heads} of keys and values, do not divide among "
    if scenario.place.placement == "swap":
        problem += f"{size:,} devices, and each half is one engine"
        remedy = f"use halves of {either(sizes)}: {either([2 * each for each in sizes])} devices in all"
    else:
        problem += f"{size:,} devices of an engine"
        remedy = f"use {either(sizes)}"
    raise ConfigError(problem, where="engine.tensor_parallel_size", remedy=remedy)


def engine_sizes(shape: Shape) -> list[int]:
    """Devices that an engine may have, the fewest first."""
    least = [size for size in range(1, math.isqrt(shape.heads) + 1) if not shape.heads % size]
    divisors = sorted({*least, *(shape.heads // size for size in least)})
    return [size for size in divisors if _shared(shape, size)]


def _shared(shape: Shape, size: int) -> bool:
    fewer, more = sorted((shape.kv_heads, size))
    return not shape.heads % size and not more % fewer


def either(numbers: Sequence[int]) -> str:
    """All of them, the last after "or"."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
