"""What hosts are given on Ray's nodes, and whether it fits (PURE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one host is given. It lies on one node, so a tensor-parallel engine is one bundle with several GPUs."""

    cpus: float = 1
    gpus: float = 0

    def __str__(self) -> str:
        amounts = [(self.cpus, "CPU"), (self.gpus, "GPU")]
        return " and ".join(f"{count:g} {unit}{'' if count == 1 else 's'}" for count, unit in amounts if count) or "nothing"


def counted(bundles: Sequence[Bundle]) -> str:
    """Such as `2 hosts with 1 CPU, 1 host with 1 CPU and 2 GPUs`."""
    kinds = {bundle: bundles.count(bundle) for bundle in bundles}
    return ", ".join(f"{count} host{'' if count == 1 else 's'} with {kind}" for kind, count in kinds.items())


def fitting(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> int:
    """How many of the bundles fit on nodes that have so much: large ones first, each on the first node with room."""
    rooms = [[node.gpus, node.cpus] for node in nodes]
    placed = 0
    for gpus, cpus in sorted(((bundle.gpus, bundle.cpus) for bundle in bundles), reverse=True):
        room = next((room for room in rooms if room[0] >= gpus and room[1] >= cpus), None)
        if room is not None:
            room[0] -= gpus
            room[1] -= cpus
            placed += 1
    return placed
