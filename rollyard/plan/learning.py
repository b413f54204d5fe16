"""What training a batch takes (PURE).

Two operations for each parameter and token forward, twice that backward (Kaplan et al. 2020, arXiv 2001.08361: 6 N a token),
and forward once more where activations are computed again (8 N; Korthikanti et al. 2022, arXiv 2205.05198); for attention
two operations for each multiply-add of each pair of tokens, in the same proportion. With experts N is what one token is
multiplied with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollyard.plan.devices import Devices
from rollyard.plan.scenario import CostsConfig
from rollyard.plan.shape import Shape


@dataclass(frozen=True, slots=True)
class TrainingCosts:
    """Of all devices that train together.

    Args:
        item: bytes of a parameter.
        trained: parameters that are trained: all, or those of an adapter.
        number: bytes of one of these, and of its gradient.
        kept: bytes of one of these that stay from step to step: itself, moments, a finer copy.
        minibatches: optimizer steps on a batch.
        budget: tokens of a micro-batch.
    """

    shape: Shape
    devices: Devices
    costs: CostsConfig
    item: int
    trained: int
    number: int
    kept: float
    minibatches: int
    budget: int

    def work(self, groups: Iterable[tuple[int, Sequence[int]]]) -> tuple[int, int]:
        """Tokens and pairs of a batch.

        Args:
            groups: tokens of each prompt, and of its completions. A completion's last token is input to nothing, and of an
                empty one nothing is learnt, nor of a prompt without others.
        """
        tokens = pairs = 0
        for prompt, completions in groups:
            rows = [completion - 1 for completion in completions if completion]
            times = min(len(rows), 1) if self.costs.shared_prompts else len(rows)
            tokens += times * prompt
            pairs += times * (prompt * (prompt + 1) // 2)
            for own in rows:
                tokens += own
                pairs += own * prompt + own * (own + 1) // 2
        return tokens, pairs

    def flops(self, tokens: int, pairs: int) -> float:
        """Of a batch, logprob passes included.

        Args:
            tokens: prompts and completions, each prompt as often as it is computed.
            pairs: of a token with itself and each before it that it attends to.
        """
        forward = 2.0 * (self.shape.active * tokens + self.shape.attended * pairs)
        # An adapter's frozen weights have no gradient of their own.
        backward = forward if self.trained < self.shape.parameters else 2 * forward
        adapter = 6.0 * self.trained * tokens if self.trained < self.shape.parameters else 0.0
        again = forward if self.costs.recompute else 0.0
        return forward + backward + again + adapter + self.costs.logprob_passes * forward

    def train_s(self, tokens: int, pairs: int) -> float:
        """Seconds of a batch: arithmetic or exchange, which overlap, what each micro-batch takes besides, and the optimizer.

        Args:
            tokens, pairs: see `flops`.
        """
        share = math.ceil(tokens / self.minibatches)
        filled = self.microbatches(share)
        slots = filled + self.costs.stages - 1
        speed = self.devices.train * self.devices.hardware.flops_in(self.item) * self.costs.train_flops
        computed_s = self.flops(tokens, pairs) / speed * slots / filled + self.costs.token_s * tokens
        exchanged_s = self.minibatches * self.exchange_s(share)
        besides_s = self.costs.minibatch_s + slots / self.costs.stages * self.costs.microbatch_s
        return max(computed_s, exchanged_s) + self.minibatches * (self.optimizer_s() + besides_s)

    def microbatches(self, tokens: int) -> int:
        """Of an optimizer step on so many tokens, one after the other in each pipeline; at least one.

        Devices of a rank work on its micro-batch together, and hold a part of it each, as `memory` has it.
        A pipeline of n stages takes as long as n - 1 more (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1), each in one
        n-th of the layers.
        """
        return max(1, math.ceil(tokens / (self.devices.ranks * self.budget)))

    def exchange_s(self, tokens: int) -> float:
        """What goes between devices in an optimizer step on so many tokens.

        Devices that share one copy (ZeRO stage 3, Rajbhandari et al. 2019, arXiv 1910.02054) gather parameters for each
        micro-batch, forward and backward, or once with `costs.gather` step; and they give each gradient to whom it belongs:
        `(n - 1) / n` of the bytes past each, every time. Those that have the same part of several copies sum their gradients:
        `2 (n - 1) / n` of its bytes.
        """
        devices, gradients = self.devices, self.trained * self.number
        sharing, copies = devices.copies, devices.train / devices.copies
        passes = 2 * self.microbatches(tokens) if self.costs.gather == "microbatch" else 1
        gathered = (sharing - 1) / sharing * (passes * self.shape.parameters * self.item + gradients)
        summed = 2 * (copies - 1) / copies * gradients / sharing
        return (gathered / devices.rate(sharing) + summed / devices.rate(devices.train)) / self.costs.collective

    def optimizer_s(self) -> float:
        """AdamW reads weight, gradient, two moments and a finer copy where there is one, and writes all but the gradient.

        Where all have one format and there is no copy these are seven numbers a parameter.
        """
        return (2 * self.kept + self.number) * self.trained / self.devices.copies / self.devices.hardware.bandwidth
