"""GRPO in a plain PyTorch loop. Rollyard asks, judges, compares, packs, and brings the weights to its engine.

python examples/own_loop.py
"""

import asyncio

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

import rollyard

options = {"run.steps": 16, "run.out": "runs/own_loop", "run.overwrite": True}
config = rollyard.resolve(preset="sort", overrides=options).config


def padded(samples, name, kind):
    return pad_sequence([torch.tensor(getattr(sample, name), dtype=kind) for sample in samples], batch_first=True)


async def main():
    async with rollyard.Rollouts(config) as rollouts:
        model = AutoModelForCausalLM.from_pretrained(rollouts.model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.99), weight_decay=0.0)
        async for batch in rollouts.batches():
            tokens, total = sum(sum(sample.mask) for sample in batch.train.samples), 0.0
            for samples in batch.train.micro_batches:
                ids, advantages = padded(samples, "token_ids", torch.long), padded(samples, "advantages", torch.float)
                logprobs = -cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
                loss = -(logprobs * advantages[:, 1:]).sum() / tokens  # advantages are 0 where nothing was sampled
                loss.backward()
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()
            optimizer.step()
            optimizer.zero_grad()
            await rollouts.publish(model, {"loss": total, "grad_norm": norm})
            rewards = [reward for group in batch.groups for reward in group.rewards if reward is not None]
            print(f"step {batch.step + 1}  reward {sum(rewards) / len(rewards):.3f}  loss {total:.4f}")
    print("held out:", rollouts.report.eval)


asyncio.run(main())
