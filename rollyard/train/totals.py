"""What is told of a batch, whatever the number of its micro-batches, optimizer steps and ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollyard.train.loss import TokenSums
from rollyard.train.ranks import Ranks
from rollyard.types import TrainStats, WeightVersion

SUMS = (
    "loss", "value_loss", "clipped", "truncated", "ratio", "gap", "fresh", "fresh_gap", "stale", "stale_gap", "kl", "entropy",
    "missed",
)  # fmt: skip
LARGEST = ("gap_max", "fresh_gap_max", "stale_gap_max")


@dataclass(slots=True)
class Totals:
    """Sums over the trained tokens so far, and the largest gaps."""

    loss: float = 0.0
    value_loss: float = 0.0
    clipped: float = 0.0
    truncated: float = 0.0
    ratio: float = 0.0
    gap: float = 0.0
    fresh: float = 0.0  # tokens
    fresh_gap: float = 0.0
    stale: float = 0.0  # tokens
    stale_gap: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    missed: float = 0.0
    gap_max: float = 0.0
    fresh_gap_max: float = 0.0
    stale_gap_max: float = 0.0
    ratios: list[Tensor] = field(default_factory=list)  # of every token

    def add(self, sums: TokenSums, entropy: Tensor, missed: Tensor, value_loss: Tensor | None = None) -> None:
        """Those of one pass; `entropy` and `missed` are `[trained]`."""
        found = {"entropy": entropy.sum(dtype=torch.float64), "missed": missed.sum()}
        found["value_loss"] = entropy.new_zeros(()) if value_loss is None else value_loss
        found |= {name: getattr(sums, name) for name in (*SUMS, *LARGEST) if name not in found}
        each = dict(zip(found, torch.stack([value.double() for value in found.values()]).tolist(), strict=True))
        for name in SUMS:
            setattr(self, name, getattr(self, name) + each[name])
        for name in LARGEST:
            setattr(self, name, max(getattr(self, name), each[name]))
        self.ratios.append(sums.ratios)

    def over(self, ranks: Ranks) -> Totals:
        """Of all ranks together: the same on each."""
        own = [getattr(self, name) for name in (*SUMS, *LARGEST)]
        gathered = ranks.gather(torch.tensor(own, dtype=torch.float64)).t().tolist()
        found = Totals(ratios=[_gathered(self.ratios, ranks)])
        for name, each in zip((*SUMS, *LARGEST), gathered, strict=True):
            setattr(found, name, max(each) if name in LARGEST else sum(each))
        return found

    def stats(
        self, version: WeightVersion, tokens: int, norm: float, rate: float, *, kl: bool = False, values: bool = False
    ) -> TrainStats:
        """Of the batch that made this version. `kl`, `values`: is there a reference, a value head."""
        each = max(tokens, 1)  # without a token every sum is 0
        low, high = _percentiles(self.ratios, (1, 99))
        return TrainStats(
            step=version.step,
            loss=self.loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=tokens,
            entropy=self.entropy / each,
            clipped_share=self.clipped / each,
            ratio_mean=self.ratio / tokens if tokens else 1.0,
            logprob_gap_mean=self.gap / each,
            logprob_gap_max=self.gap_max,
            kept_set_misses=self.missed / each,
            ratio_p1=low,
            ratio_p99=high,
            truncated_share=self.truncated / each,
            kl=self.kl / each if kl else None,
            value_loss=self.value_loss if values else None,
            fresh_gap_mean=self.fresh_gap / self.fresh if self.fresh else None,
            fresh_gap_max=self.fresh_gap_max if self.fresh else None,
            stale_gap_mean=self.stale_gap / self.stale if self.stale else None,
            stale_gap_max=self.stale_gap_max if self.stale else None,
        )


def joined(steps: Sequence[Totals]) -> Totals:
    """Of all steps of one batch: its losses are the steps' mean."""
    found = Totals(ratios=[part for each in steps for part in each.ratios])
    for name in SUMS:
        setattr(found, name, sum(getattr(each, name) for each in steps))
    found.loss, found.value_loss = (value / max(len(steps), 1) for value in (found.loss, found.value_loss))
    for name in LARGEST:
        setattr(found, name, max((getattr(each, name) for each in steps), default=0.0))
    return found


def _gathered(parts: list[Tensor], ranks: Ranks) -> Tensor:
    """All numbers of all ranks, which have different numbers of them."""
    own = torch.cat(parts).cpu() if parts else torch.empty(0)
    if ranks.size == 1:
        return own
    counts = ranks.gather(torch.tensor([len(own)])).flatten().tolist()
    padded = torch.zeros(max(counts))
    padded[: len(own)] = own
    return torch.cat([row[:count] for row, count in zip(ranks.gather(padded).cpu(), counts, strict=True)])


def _percentiles(parts: list[Tensor], which: tuple[int, ...]) -> list[float]:
    """By nearest rank; 1, which is a ratio's own value, where there is none."""
    every = torch.cat(parts) if parts else torch.empty(0)
    if not len(every):
        return [1.0 for _ in which]
    return [float(every.kthvalue(-(-percent * len(every) // 100)).values) for percent in which]
