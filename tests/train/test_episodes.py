"""Rows of episodes train exactly: a tool's tokens are seen and not learnt, whatever shares a prompt with whatever."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollyard.batch.sample import build
from rollyard.config import TrainConfig
from rollyard.model.folder import load
from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    Sampling,
    Turn,
    VersionSpan,
    WeightVersion,
)
from rollyard.watch.spans import SpanLog
from tests.tiny import tiny_folder

V0 = WeightVersion(0)
PROMPT = (3, 4, 5)


def member(index: int, numbers: random.Random) -> tuple[Rollout, list[tuple[tuple[int, ...], int, float]]]:
    """An episode of up to three turns, and what each of its tokens was sampled after: (context, token, logprob)."""

    def draw(most: int) -> tuple[int, ...]:
        return tuple(numbers.randrange(2, 40) for _ in range(numbers.randint(1, most)))

    turns, ids, logprobs, facts = [], (), (), []
    seen = PROMPT
    for turn in range(index % 3 + 1):
        answer = draw(4)
        turns.append(Turn(seen, len(answer), FinishReason.STOP))
        for place, token in enumerate(answer):
            logprobs += (-3.6 + numbers.gauss(0, 0.4),)
            facts.append((seen + answer[:place], token, logprobs[-1]))
        ids += answer
        seen = PROMPT + draw(3) if (index + turn) % 3 == 2 else seen + answer + draw(3)
    done = Completion(0, index, ids, logprobs, (VersionSpan(V0, V0, len(ids)),), FinishReason.STOP, "", tuple(turns))
    return Rollout(done, Reward(1.0)), facts


@pytest.mark.parametrize("budget", [40, 1000])
def test_gradients_equal_a_plain_computation_token_by_token(tmp_path, budget):
    """The loss is summed over (context, token) pairs, each by a forward pass of transformers of its own; no row is used."""
    folder, numbers = tiny_folder(tmp_path), random.Random(5)
    members = [member(index, numbers) for index in range(7)]
    advantages = [numbers.gauss(0, 1) for _ in members]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss, count = torch.zeros(()), sum(len(facts) for _, facts in members)
    for (_, facts), advantage in zip(members, advantages, strict=True):
        for context, token, logprob in facts:
            new = torch.log_softmax(plain(torch.tensor([context])).logits[0, -1], -1)[token]
            ratio = torch.exp(new - logprob)
            loss = loss - torch.min(ratio * advantage, torch.clip(ratio, 0.8, 1.2) * advantage) / count
    loss.backward()

    group = Group(Prompt(0, 0, PROMPT, ""), tuple(rollout for rollout, _ in members))
    batch = build(0, [group], [advantages], budget, Sampling(9))
    assert any(sample.part for sample in batch.samples) and "101" in map(holes, batch.samples)
    assert (len(batch.micro_batches) > 1) == (budget == 40)
    ours, found = trainer(folder), {}
    ours._optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in ours._model.named_parameters()})
    stats = ours._train(batch)
    assert stats.tokens == count and stats.loss == pytest.approx(loss.item(), abs=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=2e-5)


def holes(sample) -> str:
    """The mask after the prompt, runs of one value as one: 101 where something stands between two answers."""
    flags = "".join("01"[flag] for flag in sample.mask).lstrip("0")
    return "".join(flag for place, flag in enumerate(flags) if place == 0 or flags[place - 1] != flag)


class Here:
    """A device that computes in the calling thread."""

    spans = SpanLog()

    async def run(self, call, *args):
        return call(*args)


def trainer(folder) -> ReferenceTrainer:
    return ReferenceTrainer(load(folder), Here(), TrainConfig(lr=1e-2, correction="none", max_grad_norm=1e6), 9, folder, V0)
