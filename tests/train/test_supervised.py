"""The supervised warm-up against plain transformers and torch."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollyard.errors import NonFinite
from rollyard.model.attention import Tree, packed_attention
from rollyard.model.folder import load
from rollyard.train.supervised import fit
from tests.tiny import tiny_folder


def make_rows(count: int, seed: int = 0) -> list[tuple[tuple[int, ...], int]]:
    numbers = random.Random(seed)
    return [
        (tuple(numbers.randrange(2, 40) for _ in range(prompt + numbers.randint(1, 5))), prompt)
        for prompt in (numbers.randint(1, 4) for _ in range(count))
    ]


def test_steps_equal_plain_ones(tmp_path):
    """Steps of 3, 3 and 1 rows, each the mean over its completion tokens."""
    folder, rows, told = tiny_folder(tmp_path), make_rows(7), []
    ours = load(folder)
    batches = (rows[:3], rows[3:6], rows[6:])
    fit(ours, iter(batches), lr=1e-3, progress=told.append)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), 1e-3)
    for some in batches:
        terms = []
        for ids, prompt in some:
            logprobs = torch.log_softmax(plain(torch.tensor([ids])).logits[0], -1)
            terms += [logprobs[t - 1, ids[t]] for t in range(prompt, len(ids))]
        optimizer.zero_grad()
        (-torch.stack(terms).mean()).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    assert told == [0, 1, 2]
    assert ours.stamp.generation == load(folder).stamp.generation + 3
    expected = dict(plain.named_parameters())
    for name, value in ours.named_parameters():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)


def test_it_learns_the_completion_and_not_the_prompt(tmp_path):
    """One row over and over: the loss of its completion falls below 0.1 nats, that of its prompt does not."""
    ids, prompt = (3, 9, 4, 20, 21, 22, 1), 3
    model = load(tiny_folder(tmp_path))
    fit(model, [[(ids, prompt)] * 4] * 30, lr=5e-3, progress=lambda _: None)
    with torch.no_grad():
        flat = torch.tensor(ids)
        logprobs = model.logits(model.hidden(flat, torch.arange(len(ids)), packed_attention([Tree(len(ids))]))).log_softmax(-1)
    each = -logprobs[:-1].gather(1, flat[1:, None]).squeeze(1)
    assert each[prompt - 1 :].max() < 0.1
    assert each[: prompt - 1].min() > 1.0


def test_non_finite_stops_before_the_step(tmp_path):
    model = load(tiny_folder(tmp_path))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    before, generation = {name: value.detach().clone() for name, value in model.named_parameters()}, model.stamp.generation
    with pytest.raises(NonFinite, match="supervised step 1"):
        fit(model, [make_rows(2)], lr=1e-3, progress=lambda _: None)
    assert model.stamp.generation == generation and all(value.grad is None for value in model.parameters())
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)


def test_what_progress_raises_ends_the_work_between_steps(tmp_path):
    model = load(tiny_folder(tmp_path))
    generation = model.stamp.generation

    def stop_before_the_third(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(model, [make_rows(2)] * 5, lr=1e-3, progress=stop_before_the_third)
    assert model.stamp.whole and model.stamp.generation == generation + 2
