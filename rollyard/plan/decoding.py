"""What an engine's steps take (PURE).

A step takes what the slower of two takes, memory or arithmetic (the roofline of Williams, Waterman and Patterson 2009), each at a
share of what its maker states, and a floor besides. With tensor parallelism (Shoeybi et al. 2019, arXiv 1909.08053)
each device has a part of every matrix, and two sums a layer go over the links.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from rollyard.plan.devices import Devices
from rollyard.plan.scenario import CostsConfig
from rollyard.plan.shape import Shape
from rollyard.plan.step import Line, StepCost

SUMS: Final = 2  # of a layer, with tensor parallelism


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """Of one engine, which may be several devices.

    Args:
        weight: bytes of a parameter.
        item: bytes of a number of keys, values and activations.
        kv_tokens: tokens of keys and values that there is room for.
    """

    shape: Shape
    devices: Devices
    costs: CostsConfig
    weight: float
    item: int
    kv_tokens: int
    _steps: dict[int, StepCost] = field(default_factory=dict, compare=False, repr=False)

    def step(self, running: int) -> StepCost:
        """A decode step of so many sequences, each a token further.

        Memory: `(touched parameters * weight / devices + cache of the new tokens + cache of the context) / bandwidth`.
        Arithmetic: `2 * (active parameters * sequences + multiply-adds of a pair * context) / FLOP/s`.
        """
        if running not in self._steps:
            self._steps[running] = self._step(running)
        return self._steps[running]

    def prefill_s(self, tokens: int, pairs: int, beside: int = 1) -> float:
        """Seconds that computing tokens of prompts adds to a step: arithmetic, or reading experts that nothing else there goes
        to, where that takes longer; and what goes over links.

        Args:
            tokens: that are computed. The head is left out: one token of a prompt needs it.
            pairs: of a token with itself and each before it that it attends to.
            beside: sequences of which the step reads the weights anyway.
        """
        shape, costs = self.shape, self.costs
        flops = 2 * ((shape.active - shape.head) * tokens + shape.attended * pairs)
        read = (shape.touched(beside + tokens) - shape.touched(beside)) * self.weight / self.devices.tensor_parallel
        read_s = read / (self.devices.hardware.bandwidth * costs.decode_bandwidth)
        return max(flops / (self._flops * costs.prefill_flops), read_s) + self._sums_s(tokens)

    def _step(self, running: int) -> StepCost:
        shape, costs = self.shape, self.costs
        bandwidth = self.devices.hardware.bandwidth * costs.decode_bandwidth
        flops = self._flops * costs.decode_flops
        cached = cached_bytes(shape, self.devices.tensor_parallel, self.item)
        weights = shape.touched(running) * self.weight / self.devices.tensor_parallel
        floor = costs.step_s + costs.sequence_s * running + self._sums_s(running)
        if self.devices.tensor_parallel > 1:
            floor += costs.tensor_parallel_s
        if self.devices.tensor_parallel > self.devices.hardware.node:
            floor += SUMS * shape.layers * costs.nodes_s
        memory = Line((weights + cached * running) / bandwidth, cached / bandwidth)
        arithmetic = Line(2 * shape.active * running / flops, 2 * shape.read / flops)
        return StepCost(floor, (memory, arithmetic))

    @property
    def _flops(self) -> float:
        return self.devices.tensor_parallel * self.devices.hardware.flops_in(self.item)

    def _sums_s(self, tokens: int) -> float:
        """A sum over n devices moves `2 (n - 1) / n` of its bytes past each of them."""
        many = self.devices.tensor_parallel
        moved = SUMS * self.shape.layers * tokens * self.shape.hidden * self.item * 2 * (many - 1) / many
        return moved / (self.devices.rate(many) * self.costs.collective)


def cached_bytes(shape: Shape, tensor_parallel: int, item: int) -> float:
    """Bytes of a token's keys and values on each device of an engine. A key-value head is on one device at least."""
    return shape.cache * item * max(1 / tensor_parallel, 1 / shape.kv_heads)
