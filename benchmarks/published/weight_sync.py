"""Weight syncs that were published, beside what the simulator says of them: prints the table of docs/costs.md.

    python benchmarks/published/weight_sync.py

Bytes, devices and how a system sends them are as published, or marked. What is not said is as in the row's remark. All is as
`plan.moving` has it, which is what a simulated run goes by; once with nothing fitted, and once with the share of a card's rate
that the first row of the same way of sending comes to.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from rollyard.plan.devices import Devices
from rollyard.plan.hardware import HARDWARE
from rollyard.plan.models import shape_of
from rollyard.plan.moving import Weights, moving
from rollyard.plan.scenario import CostsConfig


@dataclass(frozen=True, slots=True)
class Row:
    """One published sync.

    Args:
        item: bytes of a parameter as it travels.
        sources, receivers: devices.
        engine: devices of one engine.
        seconds: as published, the least and the most.
        parts: each device is sent what it needs; else everything, by all cards of its node.
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
    parts: bool = False
    changed: float | None = None

    @property
    def weights(self) -> Weights:
        return Weights(shape_of(self.model).parameters, self.item, self.item, self.changed)

    @property
    def costs(self) -> CostsConfig:
        return CostsConfig(parts=self.parts, cards=1 if self.parts else HARDWARE[self.hardware].node)

    @property
    def devices(self) -> Devices:
        """Those that send share one copy, as all of these systems have it."""
        engines, train = self.receivers // self.engine, self.sources
        return Devices(HARDWARE[self.hardware], engines, self.engine, train, train, train, apart=True)

    @property
    def way(self) -> str:
        """How it sends."""
        return "changes" if self.changed is not None else "parts" if self.parts else "everything"

    @property
    def middle_s(self) -> float:
        """As published."""
        return sum(self.seconds) / 2

    def predicted_s(self, link: float | None = None) -> float:
        """From the end of a training step until an engine writes with its weights.

        Args:
            link: share of a card's rate that is reached; None: as a run has it.
        """
        costs = self.costs if link is None else self.costs.model_copy(update={"link": link})
        return moving("broadcast", self.weights, self.devices, costs).total_s


ROWS = (
    Row("Perplexity, P2P writes", "kimi-k2", "H200", 1, 256, 128, 128, (1.3, 1.3), "one engine of all 128 [?]", parts=True),
    Row(
        "NeMo-RL, resharded over NCCL",
        "deepseek-v3",
        "H100",
        2,
        256,
        256,
        32,
        (2.39, 2.83),
        "256 + 256, engines of 32 [?]",
        parts=True,
    ),
    Row("NeMo-RL, NIXL", "deepseek-v3", "H100", 2, 256, 32, 32, (9.25, 9.25), "one engine of 32", parts=True),
    Row("NeMo-RL, NCCL", "deepseek-v3", "H100", 2, 256, 32, 32, (14.21, 14.21), "everything to every device"),
    Row("checkpoint-engine, broadcast", "qwen3-235b-a22b", "H800", 2, 8, 8, 8, (6.22, 6.22), "everything to all 8 of a node"),
    Row(
        "checkpoint-engine, broadcast",
        "kimi-k2",
        "H20",
        1,
        256,
        256,
        16,
        (16.0, 16.0),
        "everything to every device, engines of 16 [?]",
    ),
    Row("miles, NCCL", "kimi-k2", "H100", 2, 256, 256, 32, (53.3, 53.3), "everything to every device, in bfloat16 [?]"),
    Row("miles, P2P", "kimi-k2", "H100", 2, 256, 256, 32, (7.23, 7.23), "engines of 32, in bfloat16 [?]", parts=True),
    Row(
        "verl, NCCL", "qwen3-235b-a22b", "H100", 2, 32, 32, 8, (246, 266), "everything to every device, 32 + 32, engines of 8 [?]"
    ),
    Row("verl, delta", "qwen3-235b-a22b", "H100", 2, 32, 32, 8, (11.4, 14.9), "2 % changed [?]", changed=CostsConfig().changed),
)


def link_of(way: str) -> float:
    """Share of a card's rate with which the first row of this way takes what was published."""
    first = next(row for row in ROWS if row.way == way)
    # Seconds are so many / share, and others besides.
    besides = 2 * first.predicted_s(1.0) - first.predicted_s(0.5)
    return (first.predicted_s(1.0) - besides) / (first.middle_s - besides)


def table() -> Iterator[str]:
    """As Markdown."""
    yield "| system | model | bytes | taken as | predicted s | published s | error | fitted, s | error |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for row in ROWS:
        found, (least, most), link = row.predicted_s(), row.seconds, link_of(row.way)
        published = f"{least:g}" if least == most else f"{least:g} - {most:g}"
        size = f"{row.weights.sent / 1e9:,.0f} GB"
        cells = [row.system, row.model, size, row.remark, f"{found:.2f}", published, f"{found / row.middle_s - 1:+.0%}"]
        fitted = row.predicted_s(link)
        if row is next(each for each in ROWS if each.way == row.way):
            cells += [f"{fitted:.2f} (link {link:.3f})", ""]
        else:
            cells += [f"{fitted:.2f}", f"{fitted / row.middle_s - 1:+.0%}"]
        yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print("\n".join(table()))
