from __future__ import annotations

import pytest
import torch

from rollyard.bench.setting import Setting
from rollyard.bench.train import TRAIN, batch, measure, products_s
from rollyard.bench.workload import Shape, build
from rollyard.config import Config
from rollyard.train.flops import Gemm
from tests.tiny import tiny_folder

SHAPE = Shape(2, 3, (5, 9), 7)


def test_the_batch_is_one_that_a_run_could_have_made():
    work = build(SHAPE, 50, 1)
    made = batch(Config(), work, step=4)
    assert made.step == 4 and len(made.samples) == 6
    for sample in made.samples:
        prompt = work.prompts[sample.group + sample.member]
        assert sample.token_ids[: len(prompt)] == prompt and sum(sample.mask) == 7
        assert max(sample.token_ids) <= 50 and set(sample.advantages[len(prompt) :]) == {1.0 if sample.member % 2 else -1.0}
    assert len({sample.token_ids for sample in made.samples}) == 6


@pytest.mark.parametrize("name", TRAIN)
def test_what_is_measured_has_64_completions(name):
    assert TRAIN[name].requests == 64


def test_the_time_of_products_is_that_of_the_same_calls_by_hand():
    """Three products of 200^3, 10 of each: the sum must be near 30 times one of them."""
    import time

    x = torch.randn(200, 200)
    torch.mm(x, x)
    trials = []
    for _ in range(30):
        started = time.perf_counter()
        torch.mm(x, x)
        trials.append(time.perf_counter() - started)
    assert 15 * min(trials) < products_s([Gemm(200, 200, 200, 10)], "float32") < 300 * min(trials)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_step_takes_turns_with_its_products(tmp_path, dtype):
    setting = Setting(tiny_folder(tmp_path), "8x8", "", dtype, rounds=2, threads=1)
    result = await measure(setting, SHAPE, lambda line: None)
    step, products = result.sides
    assert result.unit == "s" and result.ratios == tuple(p / s for p, s in zip(products.values, step.values, strict=True))
    found = {figure.name: figure.value for figure in step.figures}
    assert found["trained tokens"] == pytest.approx(42 / step.spread.median, rel=0.6) and found["micro-batches"] >= 1
