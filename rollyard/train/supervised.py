"""A short supervised warm-up: makes the base policy of a built-in task."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch

from rollyard.errors import NonFinite
from rollyard.model.attention import PackedAttention
from rollyard.model.head import sampled_logprobs
from rollyard.model.transformer import CausalLM
from rollyard.train.rows import Rows
from rollyard.types import Sample

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
        loss = _loss(model, rows)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if not math.isfinite(norm):
            optimizer.zero_grad(set_to_none=True)
            raise NonFinite(f"supervised step {step}: loss {float(loss.detach())}, gradient norm {norm}")
        with model.stamp.writing():
            optimizer.step()


def _loss(model: CausalLM, rows: Sequence[TrainingRow]) -> torch.Tensor:
    samples = [_sample(ids, prompt) for ids, prompt in rows]
    flat = Rows.of(samples, model.head_weight.device)
    assert flat is not None, "every row has tokens after its prompt"
    hidden = model.hidden(flat.ids, flat.positions, PackedAttention(flat.lengths, flat.ids.device))
    logprobs, _, _ = sampled_logprobs(hidden[flat.predicting], model.head_weight, flat.targets, temperature=1.0)
    return -logprobs.mean()


def _sample(ids: tuple[int, ...], prompt: int) -> Sample:
    mask = (False,) * prompt + (True,) * (len(ids) - prompt)
    zeros = (0.0,) * len(ids)
    return Sample(0, 0, ids, mask, zeros, zeros, ())
