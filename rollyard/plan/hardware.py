"""Devices and what connects them (PURE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rollyard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device, in a node of several. Rates are what its maker states, of one device, in one direction."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes/s of that memory
    flops: float  # dense bfloat16 operations/s
    link: float  # bytes/s to the others of its node
    nic: float  # bytes/s to other nodes
    node: int  # devices of a node
    source: str = ""


HARDWARE: Final[Mapping[str, Hardware]] = {
    "H100": Hardware("H100", 80e9, 3.35e12, 989e12, 450e9, 50e9, 8, "NVIDIA H100 SXM data sheet"),
}


def hardware_of(name: str) -> Hardware:
    """Raises ConfigError for a name that is not in the table."""
    if name not in HARDWARE:
        raise ConfigError(f"there is no device {name!r}", where="cluster.hardware", remedy=f"one of: {', '.join(HARDWARE)}")
    return HARDWARE[name]
