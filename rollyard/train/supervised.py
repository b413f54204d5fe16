"""A short supervised warm-up: makes the base policy of a built-in task."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from rollyard.model.attention import PackedAttention
from rollyard.model.head import sampled_logprobs
from rollyard.model.transformer import CausalLM
from rollyard.train.rows import Rows
from rollyard.types import Sample


def fit(
    model: CausalLM,
    rows: Sequence[tuple[tuple[int, ...], int]],
    *,
    batch: int,
    lr: float,
    progress: Callable[[int, int], None],
) -> None:
    """Cross-entropy on the tokens after each row's prompt, AdamW, `len(rows) // batch` steps, each row once.

    Args:
        model: changed in place.
        rows: (token ids, length of the prompt) of each row, in the order they are learned from.
        batch: rows of one step.
        lr: learning rate.
        progress: told (steps done, steps in all) after each step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr, fused=True)
    steps = len(rows) // batch
    for step in range(steps):
        loss = _loss(model, rows[step * batch : (step + 1) * batch])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with model.stamp.writing():
            optimizer.step()
        progress(step + 1, steps)


def _loss(model: CausalLM, rows: Sequence[tuple[tuple[int, ...], int]]) -> torch.Tensor:
    samples = [_sample(ids, prompt) for ids, prompt in rows]
    flat = Rows.of(samples, model.head_weight.device)
    assert flat is not None, "every row has tokens after its prompt"
    hidden = model.hidden(flat.ids, flat.positions, PackedAttention(flat.lengths, flat.ids.device))
    logprobs, _, _ = sampled_logprobs(hidden[flat.predicting], model.head_weight, flat.targets, temperature=1.0)
    return -logprobs.mean()


def _sample(ids: tuple[int, ...], prompt: int) -> Sample:
    mask = tuple(bool(flag) for flag in np.arange(len(ids)) >= prompt)
    zeros = (0.0,) * len(ids)
    return Sample(0, 0, ids, mask, zeros, zeros, ())
