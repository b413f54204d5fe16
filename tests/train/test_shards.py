"""Ranks that share one model learn what one trainer with all of it learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_folder
from tests.train.hosts import make
from tests.train.sharing import shared
from tests.train.test_ranks import parts
from tests.train.test_trainer import make_samples

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("qwen3", False)])
async def test_two_ranks_learn_what_one_learns(tmp_path: Path, family: str, tied: bool) -> None:
    """Also when they have different numbers of passes, or one has none. The gradients are clipped."""
    folder = tiny_folder(tmp_path, family, tied)
    config = {"max_grad_norm": 0.05, "lr": 1e-3}
    one = make(folder, **config)
    async with shared(folder, tmp_path / "scratch", 2, **config) as both:
        for step in range(20):
            samples = make_samples(13, seed=step)
            single = await one.train(parts(samples, 13, step=step))
            several = await both.trainer.train(parts(samples, *((6, 7), (2, 11), (13, 0))[step % 3], step=step))
            assert several.tokens == single.tokens
            assert several.loss == pytest.approx(single.loss, rel=1e-4, abs=1e-7)
            assert several.grad_norm == pytest.approx(single.grad_norm, rel=1e-4)
            print(step, single.loss, several.loss / single.loss - 1, several.grad_norm / single.grad_norm - 1)
    one._device.close()
