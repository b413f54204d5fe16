from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollyard.bench.agreement import compare, logit_gap
from rollyard.bench.peer import PeerError
from rollyard.bench.result import Agreement, Difference
from rollyard.model.folder import load
from tests.tiny import tiny_folder

PROMPTS = [[1, 2], [3]]


class Gaps:
    def __init__(self, nats: float) -> None:
        self.nats, self.asked = nats, []

    async def __call__(self, context, token, other):
        self.asked.append((list(context), token, other))
        return self.nats


async def test_tokens_after_the_first_difference_do_not_count():
    gaps = Gaps(-2e-4)
    found = await compare(PROMPTS, [[5, 6, 7], [8, 9, 9]], [[5, 6, 7], [8, 4, 9]], gaps, 1e-3)
    assert found == Agreement(tokens=6, agreed=4, differences=(Difference(1, 1, 2e-4),))
    assert gaps.asked == [([3, 8], 9, 4)]


@pytest.mark.parametrize("nats", [0.51, -0.51, math.nan])
async def test_a_difference_that_is_no_near_tie_ends_the_benchmark(nats):
    with pytest.raises(PeerError, match="greedy token 0 of prompt 1 is 8 here and 7 there"):
        await compare(PROMPTS, [[5], [8]], [[5], [7]], Gaps(nats), 0.5)


def test_the_gap_is_that_of_transformers_logits(tmp_path):
    folder = tiny_folder(tmp_path)
    context = [3, 9, 4, 20]
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([context])).logits[0, -1]
    assert logit_gap(load(folder, torch.float32), context, 7, 30) == pytest.approx(float(logits[7] - logits[30]), abs=1e-4)
