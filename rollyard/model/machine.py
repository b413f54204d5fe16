"""What a device can do at most, measured in some hundredths of a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

TRIES: Final = 3
SIDE: Final = {"cpu": 512, "cuda": 4096}  # of a square matrix: large enough for the full rate
BYTES: Final = {"cpu": 2**25, "cuda": 2**28}  # more than caches hold, or nearly


@dataclass(frozen=True, slots=True)
class Machine:
    """Operations and bytes a second, of one device."""

    flops_per_s: float
    bytes_per_s: float

    @property
    def balance(self) -> float:
        """Operations a byte, at which neither waits for the other."""
        return self.flops_per_s / self.bytes_per_s


def measure(kind: str, dtype: torch.dtype) -> Machine:
    """The best of a few matrix products and copies, with the threads that are set where it is called.

    Args:
        kind: cpu or cuda.
        dtype: the number format that is computed with.
    """
    import torch

    side, count = SIDE[kind], BYTES[kind] // dtype.itemsize
    left, right = (torch.ones(side, side, dtype=dtype, device=kind) for _ in range(2))
    source, target = (torch.ones(count, dtype=dtype, device=kind) for _ in range(2))
    settle = torch.cuda.synchronize if kind == "cuda" else lambda: None
    with torch.no_grad():
        product_s = _best(lambda: torch.mm(left, right), settle)
        copy_s = _best(lambda: target.copy_(source), settle)
    return Machine(2 * side**3 / product_s, 2 * count * dtype.itemsize / copy_s)  # a copy reads and writes


def _best(call: Callable[[], object], settle: Callable[[], None]) -> float:
    """Seconds of the fastest; the first one only warms up."""
    found = []
    for _ in range(TRIES + 1):
        settle()
        began = time.perf_counter()
        call()
        settle()
        found.append(time.perf_counter() - began)
    return max(min(found[1:]), 1e-9)
