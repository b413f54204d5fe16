"""Devices and what connects them (PURE)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rollyard.errors import ConfigError

CPU: Final = "cpu"  # this machine, which has to be measured (plan/measured.py)


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of device, in a node of several. Rates are what its maker states, of one device, in one direction."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes/s of that memory
    flops: float  # dense bfloat16 operations/s; of any format where float32 is 0
    float32: float  # float32 operations/s, without TF32: torch multiplies so unless told otherwise, and we do not tell it
    link: float  # bytes/s to the others of its node
    nic: float  # bytes/s to other nodes
    host: float  # bytes/s to the memory of its machine
    node: int  # devices of a node
    source: str = ""

    def flops_in(self, item: int) -> float:
        """Operations/s on numbers of so many bytes."""
        return self.float32 if item == 4 and self.float32 else self.flops


GEN4: Final = 31.5e9  # PCI Express, 16 lanes: 16 GT/s each, 128 bits of 130
GEN5: Final = 63e9
HDR: Final = 25e9  # InfiniBand, 200 Gbit/s
NDR: Final = 50e9  # 400 Gbit/s

HARDWARE: Final[Mapping[str, Hardware]] = {
    each.name: each
    for each in (
        Hardware("A100-80", 80e9, 2.039e12, 312e12, 19.5e12, 300e9, HDR, GEN4, 8, "NVIDIA A100 SXM 80 GB data sheet; DGX A100"),
        Hardware("H100", 80e9, 3.35e12, 989e12, 67e12, 450e9, NDR, GEN5, 8, "NVIDIA H100 SXM data sheet; DGX H100's cards"),
        Hardware("H800", 80e9, 3.35e12, 989e12, 67e12, 200e9, NDR, GEN5, 8, "an H100 with NVLink of 400 GB/s: arXiv 2412.19437"),
        Hardware("H20", 96e9, 4.0e12, 148e12, 44e12, 450e9, NDR, GEN5, 8, "NVIDIA H20 as published by its resellers"),
        Hardware("H200", 141e9, 4.8e12, 989e12, 67e12, 450e9, NDR, GEN5, 8, "NVIDIA H200 SXM data sheet; DGX H200's cards"),
        Hardware("B200", 180e9, 7.7e12, 2250e12, 75e12, 900e9, NDR, GEN5, 8, "NVIDIA HGX B200 data sheet, an eighth of it"),
        Hardware("GB200", 186e9, 8.0e12, 2500e12, 80e12, 900e9, NDR, 225e9, 72, "NVIDIA GB200 NVL72 data sheet, a 72nd of it"),
        Hardware("MI300X", 192e9, 5.3e12, 1307e12, 163.4e12, 448e9, NDR, GEN5, 8, "AMD Instinct MI300X data sheet; 7 links"),
    )
}  # fmt: skip


def hardware_of(name: str) -> Hardware:
    """Raises ConfigError for a name that is not in the table."""
    if name not in HARDWARE:
        remedy = f"one of: {', '.join((*HARDWARE, CPU))}"
        raise ConfigError(f"there is no device {name!r}", where="cluster.hardware", remedy=remedy)
    return HARDWARE[name]
