"""What it takes until an engine has new weights (PURE).

The bound of any transport: each device that receives has one card, and so has each that sends, so weights are there after
`max(bytes to a device that receives / its rate, bytes from a device that sends / its rate)` at the earliest, and then they are
packed or rounded, and all sides meet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rollyard.plan.devices import Devices, nodes
from rollyard.plan.scenario import CostsConfig

INDEX: Final = 2  # bytes that say which number changed, docs/weights.md


@dataclass(frozen=True, slots=True)
class Moving:
    """Seconds of a sync."""

    copy_s: float = 0.0  # the trainer makes its copy, and does nothing else
    transfer_s: float = 0.0  # on the way, while engines go on
    load_s: float = 0.0  # an engine changes over, and writes nothing
    bytes: float = 0.0  # that travel to each engine

    @property
    def total_s(self) -> float:
        """From the end of a training step until an engine writes with its weights."""
        return self.copy_s + self.transfer_s + self.load_s


def bound_s(received: float, sent: float, rate: float) -> float:
    """Seconds until weights are there.

    Args:
        received: bytes to each device that receives.
        sent: bytes from each device that sends.
        rate: bytes/s of one card, in one direction.
    """
    return max(received, sent) / rate


def rewritten_s(read: float, written: float, devices: Devices) -> float:
    """Seconds in which one device reads and writes so many bytes of its own memory."""
    return (read + written) / devices.hardware.bandwidth


@dataclass(frozen=True, slots=True)
class Weights:
    """What travels.

    Args:
        numbers: of all that is sent.
        item: bytes of one as it travels.
        weight: bytes of one in an engine.
        changed: share that is looked for and sent, each with where it lies; None: all travel as they are.
        rewritten: bytes that an engine reads and writes besides: an adapter is merged with all weights.
    """

    numbers: int
    item: float
    weight: float
    changed: float | None = None
    rewritten: float = 0.0

    @property
    def whole(self) -> float:
        """Bytes of all of them."""
        return self.numbers * self.item

    @property
    def sent(self) -> float:
        """Bytes that travel; never more than all as they are."""
        if self.changed is None:
            return self.whole
        return min(self.whole, self.numbers * self.changed * (self.item + INDEX))


def moving(transport: str, weights: Weights, devices: Devices, costs: CostsConfig) -> Moving:
    """Seconds by one transport.

    Args:
        transport: in_place, checkpoint, shared_memory or broadcast.
    """
    hardware, tensor_parallel = devices.hardware, devices.tensor_parallel
    # An engine packs, or rounds, its part of what came; a delta is put into what it has.
    written = weights.numbers * weights.weight + weights.rewritten
    packed = rewritten_s(weights.sent / tensor_parallel, written / tensor_parallel, devices)
    if transport == "in_place":
        return _in_place(weights, packed, devices, costs)
    sources = devices.copies
    scanned = rewritten_s(2 * weights.whole / sources, 0, devices) if weights.changed is not None else 0.0
    copied = scanned + rewritten_s(weights.whole / sources, weights.sent / sources, devices)
    load_s = packed + costs.barrier_s
    if transport == "checkpoint":
        disk_s = weights.sent / costs.disk
        return Moving(copied + disk_s, disk_s, load_s, weights.sent)
    if transport == "shared_memory":
        rate = hardware.host * costs.link
        out = scanned + weights.sent / (min(sources, hardware.node) * rate)
        return Moving(out, 0.0, load_s + weights.sent / (min(tensor_parallel, hardware.node) * rate), weights.sent)
    # A chain passes each part on from engine to engine, so that a source sends its part once (NCCL's broadcast).
    received = weights.sent / (tensor_parallel if costs.parts else 1)
    transfer = bound_s(received, weights.sent / sources, _rate(devices, costs) * costs.link)
    if costs.trainer_sends:
        return Moving(copied + transfer, 0.0, load_s, weights.sent)
    return Moving(copied, transfer, load_s, weights.sent)


def _rate(devices: Devices, costs: CostsConfig) -> float:
    """Bytes/s that a broadcast brings to whom it reaches: by links inside a node, else by network cards."""
    hardware = devices.hardware
    if devices.nodes == 1:
        return hardware.link
    return hardware.nic if costs.parts else min(hardware.link, hardware.nic * min(costs.cards, hardware.node))


def _in_place(weights: Weights, packed: float, devices: Devices, costs: CostsConfig) -> Moving:
    """Nothing moves where devices train on the very part that they decode with; else each gathers its part from the others."""
    if devices.copies != devices.tensor_parallel:
        part = weights.whole / devices.tensor_parallel
        gathered = part / (devices.rate(devices.copies) * costs.link)
        return Moving(load_s=gathered + packed + costs.barrier_s, bytes=weights.whole)
    return Moving(load_s=packed if weights.item != weights.weight or weights.rewritten else 0.0)


def handoff_s(state: float, devices: Devices, costs: CostsConfig) -> float:
    """Seconds until the other half has the whole training state (swap); each device sends to one.

    Args:
        state: bytes of parameters, moments and what else training keeps.
    """
    half = devices.tensor_parallel
    rate = devices.hardware.link if 2 * half <= devices.hardware.node else devices.hardware.nic
    return state / half / (rate * costs.link) + costs.barrier_s


def stored_s(size: float, devices: Devices, costs: CostsConfig) -> float:
    """Seconds of bytes to or from the common disk, every node its part of them."""
    return size / (costs.disk * nodes(devices.copies, devices.hardware.node))
