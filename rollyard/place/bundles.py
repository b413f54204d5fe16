"""What hosts are given on Ray's nodes, and whether it fits (PURE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Nodes = Literal["one", "few", "spread"]  # all hosts on one; on as few as they fit on; each on one of its own


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one host is given. It lies on one node, so a tensor-parallel engine is one bundle with several GPUs."""

    cpus: float = 1
    gpus: float = 0

    def __str__(self) -> str:
        amounts = [(self.cpus, "CPU"), (self.gpus, "GPU")]
        return " and ".join(f"{count:g} {unit}{'' if count == 1 else 's'}" for count, unit in amounts if count) or "nothing"

    def fits(self, node: Bundle) -> bool:
        """Has a node that has so much room for it?"""
        return self.cpus <= node.cpus and self.gpus <= node.gpus


def counted(bundles: Sequence[Bundle], what: str = "host") -> str:
    """Such as `2 hosts with 1 CPU, 1 host with 1 CPU and 2 GPUs`."""
    kinds = {bundle: bundles.count(bundle) for bundle in bundles}
    return ", ".join(f"{count} {what}{'' if count == 1 else 's'} with {kind}" for kind, count in kinds.items())


def fitting(bundles: Sequence[Bundle], nodes: Sequence[Bundle], how: Nodes = "few") -> int:
    """How many of the bundles fit on nodes that have so much, when they lie there as `how` says."""
    if how == "one":
        return max((_packed(bundles, [node], largest_first=False) for node in nodes), default=0)
    return _packed(bundles, nodes) if how == "few" else _matched(bundles, nodes)


def misfit(bundles: Sequence[Bundle], nodes: Sequence[Bundle], free: Bundle, how: Nodes) -> tuple[str, str]:
    """Why a cluster has no room, and what would help.

    Args:
        nodes: what each has.
        free: what of all that nobody uses.
        how: the bundles were to lie there.
    """
    fit, have = fitting(bundles, nodes, how), counted(nodes, "node") or "no node"
    where = {"one": " on one node", "few": "", "spread": ", each on a node of its own,"}[how]
    problem = f"{counted(bundles)}{where} were asked of Ray, which has {have}, and of that {free} free"
    homeless = [bundle for bundle in bundles if not any(bundle.fits(node) for node in nodes)]
    if nodes and homeless:
        fit_none = f"{counted(homeless)} {'fits' if len(homeless) == 1 else 'fit'} no node, however empty"
        return problem, f"{fit_none}; use less for each, or larger nodes"
    if fit == len(bundles):
        return problem, "all fit once others are done; use fewer hosts, less for each, or a larger cluster"
    if how == "one" and _packed(bundles, nodes) == len(bundles):
        way = "--weights.transport broadcast, by which they may lie on several"
        return problem, f"{fit} of the {len(bundles)} hosts fit on one node; use {way}, or fewer hosts"
    if how == "spread":
        own = f"{fit} of the {len(bundles)} hosts find a node of their own"
        return problem, f"{own}; use --place.nodes auto, fewer hosts, or more nodes"
    return problem, f"{fit} of the {len(bundles)} hosts fit; use fewer hosts, less for each, or a larger cluster"


def _packed(bundles: Sequence[Bundle], nodes: Sequence[Bundle], *, largest_first: bool = True) -> int:
    """Each on the first node with room: large ones first finds room for most on several, small ones first on one."""
    rooms = [[node.gpus, node.cpus] for node in nodes]
    placed = 0
    for gpus, cpus in sorted(((bundle.gpus, bundle.cpus) for bundle in bundles), reverse=largest_first):
        room = next((room for room in rooms if room[0] >= gpus and room[1] >= cpus), None)
        if room is not None:
            room[0] -= gpus
            room[1] -= cpus
            placed += 1
    return placed


def _matched(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> int:
    """At most one on each node, as many as can be: who has a node makes room where another would do (augmenting paths)."""
    taken: dict[int, int] = {}  # node -> bundle

    def placed(bundle: int, tried: set[int]) -> bool:
        for number, node in enumerate(nodes):
            if number not in tried and bundles[bundle].fits(node):
                tried.add(number)
                if number not in taken or placed(taken[number], tried):
                    taken[number] = bundle
                    return True
        return False

    return sum(placed(bundle, set()) for bundle in range(len(bundles)))
