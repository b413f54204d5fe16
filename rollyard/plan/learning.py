"""What training a batch takes (PURE).

Two operations for each parameter and token forward, twice that backward (Kaplan et al. 2020, arXiv 2001.08361: 6 N a token),
and forward once more where activations are computed again (8 N; Korthikanti et al. 2022, arXiv 2205.05198); for attention
two operations for each multiply-add of each pair of tokens, in the same proportion. With experts N is what one token is
multiplied with.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollyard.batch.pack import first_fit
from rollyard.plan.devices import Devices
from rollyard.plan.passes import Passes
from rollyard.plan.scenario import CostsConfig
from rollyard.plan.shape import Shape


@dataclass(frozen=True, slots=True)
class TrainingCosts:
    """Of all devices that train together.

    Args:
        item: bytes of a parameter as it is stored.
        product: bytes of a number as it is multiplied.
        trained: parameters that are trained: all, or those of an adapter.
        number: bytes of one of these, and of its gradient.
        kept: bytes of one of these that stay from step to step: itself, moments, a finer copy.
        minibatches: optimizer steps on a batch.
        budget: tokens of a micro-batch.
        passes: forward passes besides, over a batch.
        recompute: activations are computed again.
    """

    shape: Shape
    devices: Devices
    costs: CostsConfig
    item: int
    product: int
    trained: int
    number: int
    kept: float
    minibatches: int
    budget: int
    passes: Passes
    recompute: bool

    def work(self, groups: Iterable[tuple[int, Sequence[int]]]) -> tuple[int, int]:
        """Tokens and pairs of a batch.

        Args:
            groups: tokens of each prompt, and of its completions. A completion's last token is input to nothing, and of an
                empty one nothing is learnt, nor of a prompt without others.
        """
        return _sum(self._sequences(groups))

    def _sequences(self, groups: Iterable[tuple[int, Sequence[int]]]) -> Iterator[tuple[int, int]]:
        """Tokens and pairs of each; a prompt that is computed once goes with the first of its completions."""
        for prompt, completions in groups:
            times = 1
            for own in (completion - 1 for completion in completions if completion):
                before = times * prompt
                yield before + own, before * (prompt + 1) // 2 + own * prompt + own * (own + 1) // 2
                times = 0 if self.costs.shared_prompts else 1

    def flops(self, tokens: float, pairs: float) -> float:
        """Of a batch, logprob passes included.

        Args:
            tokens: prompts and completions, each prompt as often as it is computed.
            pairs: of a token with itself and each before it that it attends to.
        """
        forward = 2.0 * (self.shape.active * tokens + self.shape.attended * pairs)
        # An adapter's frozen weights have no gradient of their own.
        backward = forward if self.trained < self.shape.parameters else 2 * forward
        adapter = 6.0 * self.trained * tokens if self.trained < self.shape.parameters else 0.0
        again = forward if self.recompute else 0.0
        besides = self.passes.bodies * forward + self.passes.heads * 2.0 * self.shape.head * tokens
        return forward + backward + again + adapter + besides

    def batch_s(self, groups: Iterable[tuple[int, Sequence[int]]]) -> float:
        """Seconds of a batch, its sequences packed as `costs.packed` says. Groups as in `work`."""
        if self.costs.packed == "evenly":
            return self.train_s(*self.work(groups))
        rows = list(self._sequences(groups))
        bounds = [len(rows) * part // self.minibatches for part in range(self.minibatches + 1)]
        return sum(self._packed_s(rows[begin:end]) for begin, end in pairwise(bounds))

    def _packed_s(self, rows: Sequence[tuple[int, int]]) -> float:
        """An optimizer step on whole sequences, first-fit decreasing. Every rank has as many micro-batches as another, and where
        they exchange parameters or experts at each layer, all wait for the one whose micro-batch has most to compute.
        """
        parts = [_sum(rows[place] for place in bin_) for bin_ in first_fit([tokens for tokens, _ in rows], self.budget)]
        work = sorted((self.flops(*part) for part in parts), reverse=True)
        filled = max(1, math.ceil(len(work) / self.devices.ranks))
        slots = filled + self.costs.stages - 1
        longest = sum(work[:: self.devices.ranks]) * self.devices.ranks
        computed_s = longest / self._speed * slots / filled + self.costs.token_s * sum(tokens for tokens, _ in rows)
        besides_s = self.costs.minibatch_s + slots / self.costs.stages * self.costs.microbatch_s
        return max(computed_s, self._exchange_s(filled)) + self.optimizer_s() + besides_s

    @property
    def _speed(self) -> float:
        """FLOP/s of all together."""
        return self.devices.train * self.devices.hardware.flops_in(self.product) * self.costs.train_flops

    def train_s(self, tokens: int, pairs: int) -> float:
        """Seconds of a batch: arithmetic or exchange, which overlap, what each micro-batch takes besides, and the optimizer.
        Tokens fill micro-batches evenly.

        Args:
            tokens, pairs: see `flops`.
        """
        share = math.ceil(tokens / self.minibatches)
        filled = self.microbatches(share)
        slots = filled + self.costs.stages - 1
        computed_s = self.flops(tokens, pairs) / self._speed * slots / filled + self.costs.token_s * tokens
        exchanged_s = self.minibatches * self.exchange_s(share)
        besides_s = self.costs.minibatch_s + slots / self.costs.stages * self.costs.microbatch_s
        return max(computed_s, exchanged_s) + self.minibatches * (self.optimizer_s() + besides_s)

    def least_s(self, tokens: float, pairs: float) -> float:
        """No batch of so many tokens and pairs takes less, and batches of so many in the mean do not either.

        What `train_s` says, with parts of micro-batches and of a pipeline's fill left out: convex in both, and never falling.
        """
        share = tokens / self.minibatches
        filled = max(1.0, share / (self.devices.ranks * self.budget))
        computed_s = self.flops(tokens, pairs) / self._speed + self.costs.token_s * tokens
        besides_s = self.costs.minibatch_s + (filled + self.costs.stages - 1) / self.costs.stages * self.costs.microbatch_s
        exchanged_s = self.minibatches * self._exchange_s(filled)
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
        micro-batch, forward, backward and in each pass besides, or once with `costs.gather` step; and they give each gradient to
        whom it belongs: `(n - 1) / n` of the bytes past each, every time. Those that have the same part of several copies sum
        their gradients: `2 (n - 1) / n` of its bytes.
        """
        return self._exchange_s(self.microbatches(tokens))

    def _exchange_s(self, microbatches: float) -> float:
        devices, gradients = self.devices, self.trained * self.number
        sharing, copies = devices.copies, devices.train / devices.copies
        passes = (2 + self.passes.bodies) * microbatches if self.costs.gather == "microbatch" else 1
        gathered = (sharing - 1) / sharing * (passes * self.shape.parameters * self.item + gradients)
        summed = 2 * (copies - 1) / copies * gradients / sharing
        return (gathered / devices.rate(sharing) + summed / devices.rate(devices.train)) / self.costs.collective

    def optimizer_s(self) -> float:
        """AdamW reads weight, gradient, two moments and a finer copy where there is one, and writes all but the gradient.

        Where all have one format and there is no copy these are seven numbers a parameter.
        """
        return (2 * self.kept + self.number) * self.trained / self.devices.copies / self.devices.hardware.bandwidth


def _sum(parts: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Tokens and pairs of all."""
    tokens = pairs = 0
    for one, more in parts:
        tokens, pairs = tokens + one, pairs + more
    return tokens, pairs
