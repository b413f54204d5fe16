"""A trainer elsewhere: it takes batches from a service by HTTP, learns from them, and uploads the weights.

    rollyard serve --preset sort --run.steps 12       # in another shell
    python examples/remote_trainer.py http://127.0.0.1:8000

On another machine, a second argument names a copy of the model that the service began with. ROLLYARD_TOKEN as there.
"""

import os
import sys

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from rollyard.serve.client import Client


def padded(samples, name, kind):
    return pad_sequence([torch.tensor(getattr(sample, name), dtype=kind) for sample in samples], batch_first=True)


def main(url, folder=""):
    with Client(url, os.environ.get("ROLLYARD_TOKEN", "")) as client, client.trainer("example", wait_s=600) as trainer:
        model = AutoModelForCausalLM.from_pretrained(folder or client.status()["model"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.99), weight_decay=0.0)
        for batch in trainer.batches():
            tokens, total = sum(sum(sample.mask) for sample in batch.train.samples), 0.0
            for samples in batch.train.micro_batches:
                ids, advantages = padded(samples, "token_ids", torch.long), padded(samples, "advantages", torch.float)
                logprobs = -cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
                loss = -(logprobs * advantages[:, 1:]).sum() / max(tokens, 1)  # advantages are 0 where nothing was sampled
                loss.backward()
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item()
            optimizer.step()
            optimizer.zero_grad()
            trainer.publish(model, {"loss": total, "grad_norm": norm})
            rewards = [reward for group in batch.groups for reward in group.rewards if reward is not None]
            print(f"step {batch.step + 1}  reward {sum(rewards) / max(len(rewards), 1):.3f}  loss {total:.4f}", flush=True)
        found = client.status()
        print(f"{found['cause'] or found['state']}: {found['trained']} prompts trained, {found['tokens']:,} tokens written")


main(*sys.argv[1:])
