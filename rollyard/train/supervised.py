"""A short supervised warm-up: makes the base policy of a built-in task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from rollyard.errors import NonFinite
from rollyard.model.transformer import CausalLM
from rollyard.train.learn import learn
from rollyard.train.rows import Rows, families
from rollyard.types import Sample, Sampling

TrainingRow = tuple[tuple[int, ...], int]  # token ids, length of the prompt


def fit(model: CausalLM, batches: Iterable[Sequence[TrainingRow]], *, lr: float, progress: Callable[[int], None]) -> None:
    """Cross-entropy on the tokens after each row's prompt, one AdamW step a batch.

    Args:
        model: changed in place.
        batches: rows of each step; drawn as they are needed.
        lr: learning rate.
        progress: told the number of steps done, before each step; what it raises ends the work.

    Raises:
        NonFinite: a gradient is NaN or infinite; the parameters are those of the step before.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)
    for step, rows in enumerate(batches):
        progress(step)
        optimizer.zero_grad(set_to_none=True)
        loss = _accumulate(model, rows)
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if not math.isfinite(norm):
            optimizer.zero_grad(set_to_none=True)
            raise NonFinite(f"supervised step {step + 1}: loss {loss}, gradient norm {norm}")
        with model.stamp.writing():
            optimizer.step()


def _accumulate(model: CausalLM, rows: Sequence[TrainingRow]) -> float:
    """Add the gradients of the mean cross-entropy, which is returned."""
    samples = [_sample(ids, prompt) for ids, prompt in rows]
    flat = Rows.of(families(samples), model.head_weight.device)
    tokens = sum(flat.trained)
    found = learn(model, flat, lambda logprobs, _: -logprobs.sum() / tokens, Sampling(tokens), model.head_weight.dtype)
    return -float(found.logprobs.mean())


def _sample(ids: tuple[int, ...], prompt: int) -> Sample:
    mask = (False,) * prompt + (True,) * (len(ids) - prompt)
    zeros = (0.0,) * len(ids)
    return Sample(0, 0, ids, mask, zeros, zeros, ())
