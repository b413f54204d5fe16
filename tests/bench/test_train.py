from __future__ import annotations

from collections import Counter
from itertools import count

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rollyard.bench.setting import Setting
from rollyard.bench.train import TRAIN, batch, measure, products_s, shapes
from rollyard.bench.workload import Shape, build
from rollyard.config import Config
from rollyard.layers import resolve
from rollyard.model.flops import Gemm, gemms
from rollyard.model.folder import load
from rollyard.place.inline import DeviceThread
from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import WeightVersion
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


class Products(TorchDispatchMode):
    """Notes the shape of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[int, int, int]] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.note(*args)
        if func in (torch.ops.aten.addmm_.default, torch.ops.aten.addmm.default):
            self.note(*args[1:])
        return func(*args, **(kwargs or {}))

    def note(self, left: torch.Tensor, right: torch.Tensor) -> None:
        self.seen[left.shape[0], left.shape[1], right.shape[1]] += 1


@pytest.mark.parametrize("precision", ["model", "bfloat16"])
def test_the_shapes_that_are_timed_are_those_the_trainer_multiplies(tmp_path, monkeypatch, precision):
    """Pieces of micro-batches, and the head in chunks."""
    for module in ("rows", "trainer"):
        monkeypatch.setattr(f"rollyard.train.{module}.CACHED_TOKENS", 55)
    model = load(tiny_folder(tmp_path))
    monkeypatch.setattr("rollyard.model.head.CHUNK_LOGITS", 10 * model.architecture.vocab_size)
    config = resolve(
        overrides={"prompts.task": "sort", "train.precision": precision, "train.correction": "none", "batch.token_budget": 100}
    ).config
    made = batch(config, build(Shape(5, 3, (5, 9), 7), 40, 1), step=0)
    trainer = ReferenceTrainer(model, DeviceThread(), config.train, 7, tmp_path, WeightVersion(0))
    with Products() as products:
        trainer._train(made)
    needed = shapes(made, model.architecture)
    expected: Counter[tuple[int, int, int]] = Counter()
    for gemm in needed:
        for shape in permuted(gemm):
            expected[shape] += gemm.count
    assert products.seen == expected
    pieces = sum(gemm.count for gemm in needed if gemm.columns == model.architecture.hidden_size) / (2 * 2)  # 2 in each layer
    heads = sum(gemm.count for gemm in needed if gemm.columns == model.architecture.vocab_size)
    assert heads > pieces > len(made.micro_batches) > 1
    assert sum(gemm.flops for gemm in needed) == sum(gemm.flops for gemm in gemms(made, model.architecture))


def permuted(gemm: Gemm) -> list[tuple[int, int, int]]:
    """Forward, gradient of the input, gradient of the weight."""
    rows, inner, columns = gemm.rows, gemm.inner, gemm.columns
    return [(rows, inner, columns), (rows, columns, inner), (columns, rows, inner)]


def test_the_products_that_are_timed_are_forward_and_both_gradients():
    with Products() as products:
        assert products_s([Gemm(20, 30, 40, 10)], "float32") > 0
    assert set(products.seen) == {(20, 30, 40), (20, 40, 30), (40, 20, 30)}
    assert len(set(products.seen.values())) == 1


def test_each_product_counts_as_often_as_it_is_needed(monkeypatch):
    ticks = count()
    monkeypatch.setattr("rollyard.bench.train.time.perf_counter", lambda: float(next(ticks)))
    assert products_s([Gemm(4, 5, 6, 10), Gemm(4, 5, 7, 2)], "float32") == 3 * (10 + 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_step_takes_turns_with_its_products(tmp_path, dtype):
    setting = Setting(tiny_folder(tmp_path), "8x8", "", dtype, rounds=2, threads=1)
    result = await measure(setting, SHAPE, lambda line: None)
    step, products = result.sides
    assert result.unit == "s" and result.ratios == tuple(p / s for p, s in zip(products.values, step.values, strict=True))
    found = {figure.name: figure.value for figure in step.figures}
    assert found["trained tokens"] == pytest.approx(42 / step.spread.median, rel=0.6) and found["micro-batches"] >= 1
