"""This machine as a device: what its threads compute and its memory moves, measured in some hundredths of a second."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache

from rollyard.plan.hardware import CPU, Hardware, hardware_of
from rollyard.plan.scenario import ClusterConfig


def device_of(cluster: ClusterConfig, formats: Collection[str]) -> Hardware:
    """The kind of device that the scenario names, with the numbers that it gives itself.

    Args:
        formats: number formats that this machine is measured with: float32, bfloat16 or both.

    Raises:
        ConfigError: there is no such kind.
    """
    here = cluster.hardware == CPU
    found = _this_machine(cluster.bandwidth, cluster.flops, formats) if here else hardware_of(cluster.hardware)
    return replace(
        found,
        memory=cluster.memory or found.memory,
        bandwidth=cluster.bandwidth or found.bandwidth,
        flops=cluster.flops or found.flops,
        float32=0.0 if cluster.flops else found.float32,  # given in whatever format there is
        link=cluster.link or found.link,
        nic=cluster.nic or found.nic,
        host=cluster.host or found.host,
        node=cluster.node or found.node,
    )


def _this_machine(bandwidth: float, flops: float, formats: Collection[str]) -> Hardware:
    """Measured unless both are given. Its devices are processes: what one copies for another is read and written."""
    float32 = 0.0
    if not (bandwidth and flops):
        measured = [_measure(each) for each in sorted(set(formats))]  # bfloat16 first
        bandwidth, flops = bandwidth or measured[0][0], flops or measured[0][1]
        float32 = measured[1][1] if len(measured) > 1 else 0.0
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    copied = bandwidth / 2
    return Hardware(CPU, memory, bandwidth, flops, float32, copied, copied, copied, os.cpu_count() or 1, "measured")


@lru_cache(maxsize=2)
def _measure(dtype: str) -> tuple[float, float]:
    """Bytes and operations a second."""
    import torch

    from rollyard.model.machine import measure

    found = measure(CPU, getattr(torch, dtype))
    return found.bytes_per_s, found.flops_per_s
