"""FLOPs, by hand and by torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from rollyard.model.architecture import Architecture
from rollyard.model.flops import Gemm, attention_flops, gemms
from rollyard.model.folder import load
from rollyard.train.learn import learn
from rollyard.train.rows import Rows, families
from rollyard.types import Sample, Sampling, TrainBatch
from tests.tiny import tiny_folder

ARCH = Architecture("llama", vocab_size=50, hidden_size=8, layers=3, heads=4, kv_heads=2, head_dim=3, feed_forward=20, window=64)


def sample(prompt: tuple[int, ...], sampled: int) -> Sample:
    tokens = len(prompt) + sampled
    return Sample(0, 0, prompt + (5,) * sampled, (False,) * len(prompt) + (True,) * sampled, (0.0,) * tokens, (0.0,) * tokens, ())


def test_by_hand():
    """Prompt of 3 shared by completions of 4 and 1 (inputs 3 and 0), another prompt of 2 with 2 (input 1): 3 + 3 + 2 + 1."""
    batch = TrainBatch(0, ((sample((7, 8, 9), 4), sample((6, 6), 2), sample((7, 8, 9), 1), sample((3,), 0)),), Sampling(9))
    assert set(gemms(batch, ARCH)) == {
        Gemm(9, 8, 12, 3),
        Gemm(9, 8, 6, 6),
        Gemm(9, 12, 8, 3),
        Gemm(9, 8, 20, 6),
        Gemm(9, 20, 8, 3),
        Gemm(7, 8, 50, 1),
    }
    assert Gemm(9, 8, 6, 6).flops == 6 * 9 * 8 * 6 * 6
    # Pairs: 1+2+3, then 1+2+3 and 3 x 3 over the prompt; 1+2, then 1 and 1 x 2.
    assert attention_flops(batch, ARCH) == 12 * (6 + 6 + 9 + 3 + 1 + 2) * 4 * 3 * 3


def test_the_head_in_chunks_is_as_much_work():
    batch = TrainBatch(0, ((sample((7, 8, 9), 4), sample((6, 6), 2), sample((7, 8, 9), 1)),), Sampling(9))
    whole, cut = gemms(batch, ARCH), gemms(batch, ARCH, lambda rows: (3, 3, rows - 6))
    assert set(cut) - set(whole) == {Gemm(3, 8, 50, 2), Gemm(1, 8, 50, 1)}
    assert sum(gemm.flops for gemm in cut) == sum(gemm.flops for gemm in whole)


def test_in_two_micro_batches_a_prompt_is_computed_twice():
    one, two = sample((7, 8, 9), 4), sample((7, 8, 9), 2)
    together, apart = (TrainBatch(0, micro, Sampling(9)) for micro in (((one, two),), ((one,), (two,))))
    rows = [{gemm.rows for gemm in gemms(batch, ARCH)} for batch in (together, apart)]
    assert rows == [{7, 6}, {6, 4, 2}]
    assert gemms(TrainBatch(0, (), Sampling(9)), ARCH) == ()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_trainer_computes_just_these(tmp_path, family):
    """Counted by torch while it trains; of the products that add in place it has to be told."""
    model = load(tiny_folder(tmp_path, family))
    samples = [sample((7, 8, 9), 4), sample((6, 6), 2), sample((7, 8, 9), 1)]
    adding = {torch.ops.aten.addmm_: lambda _, x, y, **__: 2 * x[0] * x[1] * y[1]}
    with FlopCounterMode(display=False, custom_mapping=adding) as counter:
        rows = Rows.of(families(samples), torch.device("cpu"))
        learn(model, rows, lambda logprobs, _: logprobs.sum(), Sampling(9), torch.float32)
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for operator, flops in counted.items() if "attention" not in str(operator))
    assert products == sum(gemm.flops for gemm in gemms(TrainBatch(0, (tuple(samples),), Sampling(9)), model.architecture))
