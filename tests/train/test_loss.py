"""The clipped policy gradient and its denominators, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rollyard.config import TrainConfig
from rollyard.train.loss import Denominators, policy_loss, token_sums
from rollyard.types import Sample, Sampling, TrainBatch

CLIP = TrainConfig(clip_low=0.2, clip_high=0.3)


def logs(*ratios: float) -> torch.Tensor:
    return torch.tensor([math.log(ratio) for ratio in ratios])


def test_each_side_of_the_clip_range_by_hand():
    """Terms -r A or the clipped one: 1, 1.5 -> 1.3, 0.5, and for A = -1: 1.5, 0.5 -> 0.8. Clipped terms have no slope."""
    new = logs(1.0, 1.5, 0.5, 1.5, 0.5).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0])
    known = (torch.zeros(5), advantages, torch.full((5,), 0.2), CLIP)
    policy_loss(new, *known).backward()
    sums = token_sums(new, *known)
    assert policy_loss(new, *known).item() == sums.loss.item() == pytest.approx((-1.0 - 1.3 - 0.5 + 1.5 + 0.8) / 5)
    assert new.grad.tolist() == pytest.approx([-0.2, 0.0, -0.1, 0.3, 0.0])
    assert sums.clipped.item() == 2
    assert sums.ratio.item() == pytest.approx(5.0)
    assert sums.gap.item() == pytest.approx(2 * math.log(1.5) + 2 * math.log(2))
    assert sums.gap_max.item() == pytest.approx(math.log(2))


def test_an_advantage_of_zero_teaches_nothing_and_is_never_clipped():
    new = logs(0.1, 1.0, 10.0).requires_grad_()
    known = (torch.zeros(3), torch.zeros(3), torch.ones(3), CLIP)
    loss = policy_loss(new, *known)
    loss.backward()
    assert (loss.item(), token_sums(new, *known).clipped.item(), new.grad.tolist()) == (0.0, 0, [0.0, 0.0, 0.0])


def test_only_the_difference_of_logprobs_counts():
    """Behaviour -2 and -0.1, now -1.5 and -0.2: ratios e^0.5 and e^-0.1."""
    loss = policy_loss(torch.tensor([-1.5, -0.2]), torch.tensor([-2.0, -0.1]), torch.tensor([-1.0, 2.0]), torch.ones(2), CLIP)
    assert loss.item() == pytest.approx(math.exp(0.5) - 2 * math.exp(-0.1))


def sample(prompt: int, sampled: int) -> Sample:
    tokens, zeros = prompt + sampled, (0.0,) * (prompt + sampled)
    return Sample(0, 0, (5,) * tokens, (False,) * prompt + (True,) * sampled, zeros, zeros, ())


@pytest.mark.parametrize(
    ("aggregation", "long", "short"), [("token", 1 / 4, 1 / 4), ("sequence", 1 / 6, 1 / 2), ("fixed", 1 / 20, 1 / 20)]
)
def test_what_a_token_counts_by_hand(aggregation, long, short):
    """Completions of 3 and 1 tokens, of 10 at most, in different micro-batches, and one that is empty."""
    denominators = Denominators.of(TrainBatch(0, ((sample(2, 3),), (sample(4, 1), sample(3, 0))), Sampling(10)))
    assert denominators == Denominators(tokens=4, sequences=2)
    config = TrainConfig(aggregation=aggregation)
    assert denominators.weight(3, config, max_tokens=10) == pytest.approx(long)
    assert denominators.weight(1, config, max_tokens=10) == pytest.approx(short)
