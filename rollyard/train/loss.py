"""What is learnt from the trained tokens of some rows: a policy loss, what each token weighs in it, and what is told of that.

Of each token there are up to four logprobs: when it was sampled (behaviour), before the batch's first optimizer step
(proximal), now (new), and of a reference. Without a correction the ratio that a loss clips is new / behaviour; with one it is
new / proximal, and proximal / behaviour is the weight outside of it. A batch that is one step has new for proximal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rollyard.config import TrainConfig
from rollyard.train import kl
from rollyard.train.correction import LIMIT, cut, importance, limited
from rollyard.train.losses import cispo, gspo, ppo
from rollyard.types import Sample


class Kind(NamedTuple):
    """A policy loss: see the module of its name. What it is given are log ratios without a limit."""

    loss: Callable[[Tensor, Tensor, Tensor, TrainConfig], Tensor]
    clipped: Callable[[Tensor, Tensor, TrainConfig], Tensor]
    rows: bool = False  # its ratio is one for all of a row


KINDS = {
    "ppo": Kind(ppo.loss, ppo.clipped),
    "gspo": Kind(gspo.loss, ppo.clipped, rows=True),
    "cispo": Kind(cispo.loss, cispo.clipped),
}


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the trained tokens of some rows before their loss is: `[trained]` float32 each, row after row."""

    behaviour: Tensor  # logprobs when sampled
    advantages: Tensor
    weights: Tensor  # what each token counts, see `Denominators`
    trained: Sequence[int]  # trained tokens of each row
    proximal: Tensor | None = None  # logprobs before the batch's first step; None: this is that step, or nobody asks for them
    reference: Tensor | None = None  # logprobs of a reference policy
    row_ratio: Tensor | None = None  # mean log ratio of a token's row, where the loss takes that (`of_rows`)
    row_weight: Tensor | None = None  # log importance ratio of a token's row, likewise
    fresh: Tensor | None = None  # [trained] bool: written by the version that is trained; None: nobody looked


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums over trained tokens, on the device, and the ratio of each."""

    loss: Tensor
    clipped: Tensor
    truncated: Tensor
    ratio: Tensor
    gap: Tensor
    gap_max: Tensor
    fresh: Tensor  # tokens; the two kinds are none together where nobody looked
    fresh_gap: Tensor
    fresh_gap_max: Tensor
    stale: Tensor
    stale_gap: Tensor
    stale_gap_max: Tensor
    kl: Tensor
    ratios: Tensor  # [trained] float32: new / behaviour


@dataclass(frozen=True, slots=True)
class Denominators:
    """What sums over one optimizer step are divided by, so that the split into micro-batches, or over ranks, changes nothing."""

    tokens: int  # trained tokens
    sequences: int  # rollouts with a trained token, whatever the number of their rows

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Denominators:
        counts = [sum(sample.mask) for sample in samples]
        whole = [count + sample.others for count, sample in zip(counts, samples, strict=True) if sample.part == 0]
        return cls(sum(counts), sum(count > 0 for count in whole))

    def weight(self, tokens: int, config: TrainConfig, max_tokens: int) -> float:
        """What each trained token counts of a rollout that has so many of them, in all of its rows.

        token: mean over all trained tokens. sequence: mean over sequences of their means. fixed: sum over
        sequences x max_tokens; source: Dr. GRPO, https://arxiv.org/abs/2503.20783.
        """
        if config.aggregation == "token":
            return 1 / self.tokens
        return 1 / (self.sequences * (tokens if config.aggregation == "sequence" else max_tokens))


def needs_rows(config: TrainConfig, *, proximal: bool) -> bool:
    """Are the logprobs of whole rows needed before the gradient of the first token is? `proximal`: it is known already."""
    if config.correction == "none":
        return KINDS[config.loss].rows
    return KINDS[config.loss].rows if proximal else config.correction_level == "sequence"


def of_rows(known: Known, new: Tensor | None, config: TrainConfig) -> Known:
    """The same, with what is one for all tokens of a row. `new`: logprobs `[trained]`, where `needs_rows` says so."""
    corrected, rows = config.correction != "none", KINDS[config.loss].rows
    before = known.proximal if known.proximal is not None else new
    ratio, weight = None, None
    if rows and corrected and known.proximal is None:
        ratio = torch.zeros_like(known.behaviour)  # compared with itself
    elif rows:
        assert new is not None, "a row's ratio needs the logprobs of all of it"
        base = known.proximal if corrected and known.proximal is not None else known.behaviour
        ratio = _each_row(new - base, known.trained, mean=True)
    if corrected and config.correction_level == "sequence":
        assert before is not None, "a row's weight needs the logprobs of all of it"
        weight = _each_row(before - known.behaviour, known.trained, mean=False)
    return replace(known, row_ratio=ratio, row_weight=weight)


def part_loss(new: Tensor, known: Known, part: slice, config: TrainConfig) -> Tensor:
    """The loss of some tokens: a scalar. `new`: their logprobs, `[tokens]` float32 with gradient; `known` is `of_rows`."""
    log_ratio, log_weight = _log_ratios(new, known, part, config)
    weights = own = known.weights[part]
    if log_weight is not None:
        weights = weights * importance(log_weight, config)
    advantages = _advantages(new, known, part, config)
    loss = (KINDS[config.loss].loss(new, log_ratio, advantages, config) * weights).sum()
    if known.reference is not None and config.kl_kind != "k1":
        loss = loss + config.kl * (kl.estimate(new, known.reference[part], config) * own).sum()
    return loss


def policy_loss(new: Tensor, known: Known, config: TrainConfig) -> Tensor:
    """The loss of whole rows: a scalar. `new`: logprobs of all their trained tokens, `[trained]` float32 with gradient."""
    return part_loss(new, of_rows(known, new.detach(), config), slice(None), config)


@torch.no_grad()
def token_sums(new: Tensor, known: Known, config: TrainConfig) -> TokenSums:
    """What is told of the same tokens."""
    known, everything = of_rows(known, new, config), slice(None)
    log_ratio, log_weight = _log_ratios(new, known, everything, config)
    advantages = _advantages(new, known, everything, config)
    ratios = limited(new - known.behaviour).exp()
    gap = ((new if known.proximal is None else known.proximal) - known.behaviour).abs()
    cut_off = log_ratio > LIMIT if log_weight is None else cut(log_weight, config) | (log_ratio > LIMIT)
    kl_ = new.new_zeros(()) if known.reference is None else kl.estimate(new, known.reference, config)
    clipped = KINDS[config.loss].clipped(log_ratio, advantages, config)
    return TokenSums(
        loss=part_loss(new, known, everything, config).double(),
        clipped=clipped.sum(),
        truncated=cut_off.sum(),
        ratio=ratios.sum(dtype=torch.float64),
        gap=gap.sum(dtype=torch.float64),
        gap_max=gap.max(),
        **_by_age(gap, known.fresh),
        kl=kl_.sum(dtype=torch.float64),
        ratios=ratios,
    )


def _by_age(gap: Tensor, fresh: Tensor | None) -> dict[str, Tensor]:
    """Of fresh tokens and of the others: how many they are, their gaps' sum, and the largest."""
    found: dict[str, Tensor] = {}
    for name in ("fresh", "stale"):
        which = torch.zeros_like(gap, dtype=torch.bool) if fresh is None else fresh if name == "fresh" else ~fresh
        own = gap.where(which, 0.0)
        found |= {name: which.sum(), f"{name}_gap": own.sum(dtype=torch.float64), f"{name}_gap_max": own.max()}
    return found


def _log_ratios(new: Tensor, known: Known, part: slice, config: TrainConfig) -> tuple[Tensor, Tensor | None]:
    """Of the ratio that the loss clips, and of the weight outside of it if there is one."""
    base, weight = known.behaviour[part], None
    if config.correction != "none":
        proximal = new.detach() if known.proximal is None else known.proximal[part]
        weight = proximal - base if known.row_weight is None else known.row_weight[part]
        base = proximal
    return new - base if known.row_ratio is None else known.row_ratio[part], weight


def _advantages(new: Tensor, known: Known, part: slice, config: TrainConfig) -> Tensor:
    """With k1 taken from them."""
    if known.reference is None or config.kl_kind != "k1":
        return known.advantages[part]
    return known.advantages[part] - config.kl * kl.estimate(new.detach(), known.reference[part], config)


def _each_row(values: Tensor, trained: Sequence[int], *, mean: bool) -> Tensor:
    """`[trained]` -> the sum or mean of each row, at each of its tokens."""
    counts = torch.tensor(trained, device=values.device)
    row = torch.repeat_interleave(torch.arange(len(trained), device=values.device), counts)
    total = torch.zeros(len(trained), dtype=torch.float64, device=values.device).index_add_(0, row, values.double())
    return (total / counts.clamp(min=1) if mean else total).to(values.dtype)[row]
