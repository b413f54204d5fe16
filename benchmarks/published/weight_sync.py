"""Weight syncs that were published, beside the least that their links allow: prints the table of docs/costs.md.

    PYTHONPATH=. python benchmarks/published/weight_sync.py

Nothing is fitted: bytes, devices and how a system sends them are as published, or marked. What is not said is as in the
row's remark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollyard.plan.hardware import HARDWARE
from rollyard.plan.models import shape_of
from rollyard.plan.moving import INDEX, bound_s
from rollyard.plan.scenario import CostsConfig

COSTS = CostsConfig()


@dataclass(frozen=True, slots=True)
class Row:
    """One published sync.

    Args:
        item: bytes of a parameter as it travels.
        sources, receivers: devices.
        engine: devices of one engine, each of which needs its part; 0: every device is sent everything.
        seconds: as published, the least and the most.
        rounded: bytes of a parameter before it is rounded at its source; 0: it is not.
        changed: share of the numbers that travels, for a delta.
    """

    system: str
    model: str
    hardware: str
    item: float
    sources: int
    receivers: int
    engine: int
    seconds: tuple[float, float]
    remark: str
    rounded: float = 0.0
    changed: float = 0.0

    @property
    def bytes(self) -> float:
        numbers = shape_of(self.model).parameters
        return numbers * self.changed * (self.item + INDEX) if self.changed else numbers * self.item

    def predicted_s(self) -> float:
        """Bytes over the slowest card or link, rounding or looking for changes, and the barrier; one after the other."""
        hardware, whole = HARDWARE[self.hardware], shape_of(self.model).parameters * self.item
        if self.engine:
            received, sent = self.bytes / self.engine, self.bytes * (self.receivers / self.engine) / self.sources
            rate = hardware.nic
        else:  # a ring through all of them, by every card of a node
            received, sent = self.bytes, self.bytes
            rate = hardware.link if self.receivers <= hardware.node else min(hardware.link, hardware.nic * hardware.node)
        own = 0.0
        if self.rounded:
            own = whole * (self.rounded / self.item + 1) / self.sources / hardware.bandwidth
        elif self.changed:
            own = 2 * whole / self.sources / hardware.bandwidth
        return bound_s(received, sent, rate * COSTS.link) + own + COSTS.barrier_s


ROWS = (
    Row("Perplexity, P2P writes", "kimi-k2", "H200", 1, 256, 128, 128, (1.3, 1.3), "one engine of all 128 [?]", rounded=2),
    Row("NeMo-RL, resharded over NCCL", "deepseek-v3", "H100", 2, 256, 256, 32, (2.39, 2.83), "256 + 256, engines of 32 [?]"),
    Row("NeMo-RL, NIXL", "deepseek-v3", "H100", 2, 256, 32, 32, (9.25, 9.25), "one engine of 32"),
    Row("NeMo-RL, NCCL", "deepseek-v3", "H100", 2, 256, 32, 0, (14.21, 14.21), "everything to every device"),
    Row("checkpoint-engine, broadcast", "qwen3-235b-a22b", "H800", 2, 8, 8, 0, (6.22, 6.22), "everything to all 8 of a node"),
    Row("checkpoint-engine, broadcast", "kimi-k2", "H20", 1, 256, 256, 0, (16.0, 16.0), "everything to every device"),
    Row("miles, NCCL", "kimi-k2", "H100", 2, 256, 256, 0, (53.3, 53.3), "everything to every device, in bfloat16 [?]"),
    Row("miles, P2P", "kimi-k2", "H100", 2, 256, 256, 32, (7.23, 7.23), "engines of 32, in bfloat16 [?]"),
    Row("verl, NCCL", "qwen3-235b-a22b", "H100", 2, 32, 32, 0, (246, 266), "everything to every device, 32 + 32 of them [?]"),
    Row("verl, delta", "qwen3-235b-a22b", "H100", 2, 32, 32, 0, (11.4, 14.9), "2 % changed [?]", changed=COSTS.changed),
)  # fmt: skip


def table() -> Iterator[str]:
    """As Markdown."""
    yield "| system | model | bytes | taken as | predicted s | published s | error | share of the rate used |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in ROWS:
        found, (least, most) = row.predicted_s(), row.seconds
        middle = (least + most) / 2
        published = f"{least:g}" if least == most else f"{least:g} - {most:g}"
        error, used = found / middle - 1, COSTS.link * found / middle
        size = f"{row.bytes / 1e9:,.0f} GB"
        cells = (row.system, row.model, size, row.remark, f"{found:.2f}", published, f"{error:+.0%}", f"{used:.1%}")
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print("\n".join(table()))
