"""Trains a small reward model for sums of two digits from reasoning-gym, and says how good it is.

    python examples/reward_model/train.py --tokenizer models/smollm2-135m --out models/sum-judge

It learns what the task's own rule gives an answer, from answers that are made up here: right ones, wrong ones, and either
with something behind it. Problems that runs hold out are held out here too. Then `reward.model.folder` may name it.
"""

import argparse
import random
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from rollyard import gym

TASK, OPTIONS = "reasoning_gym/chain_sum", '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
BEHIND = ["", "", "", ".", "?", " is the answer", " and so on", ". The answer", " (the sum)", " = 7", ", because", " 3"]
INSTEAD = ["", "?", "the answer", "a number", "x", "to solve this"]
Answer = tuple[str, float]  # prompt and answer, and its reward


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small reward model for one-digit sums, and say how good it is.")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer that it takes")
    parser.add_argument("--out", type=Path, required=True, help="folder that it is written to")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default: 400)")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer, local_files_only=True)
    tokenizer.chat_template = None  # prompt and completion are judged as they are, one after the other
    torch.manual_seed(0)
    draw = random.Random(0)
    model = LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256,
            max_position_embeddings=256, num_labels=1, problem_type="regression", pad_token_id=tokenizer.unk_token_id,
        )
    )  # fmt: skip
    problems = [gym.training(TASK, OPTIONS, 0, place) for place in range(2000)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(given.steps):
        batch = [answer(draw.choice(problems), draw) for _ in range(64)]
        loss = (judged(model, tokenizer, batch) - torch.tensor([value for _, value in batch])).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: squared error {loss.item():.4f}", flush=True)
    report("problems it was trained on", model, tokenizer, problems, draw)
    report("problems it never saw", model, tokenizer, gym.held_out(TASK, OPTIONS, 16), draw)
    model.config.pad_token_id = None  # an id like any other from here on: Rollyard needs none
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)


def answer(problem: gym.Problem, draw: random.Random) -> Answer:
    """One that may be right, with what the task itself gives it."""
    right = int(problem.answer or "0")
    number = str(draw.choice([right, right, right + draw.randint(-3, 3), draw.randint(-9, 18)]))
    text = " " + (number + draw.choice(BEHIND) if draw.random() < 0.9 else draw.choice(INSTEAD))
    return problem.question + text, gym.score(problem.name, text)


def judged(model: LlamaForSequenceClassification, tokenizer: AutoTokenizer, batch: list[Answer]) -> torch.Tensor:
    """What the model says of each: `[answers]`."""
    rows = [tokenizer.encode(text) for text, _ in batch]
    width, pad = max(map(len, rows)), model.config.pad_token_id
    ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return model(ids, attention_mask=mask).logits[:, 0]


@torch.inference_mode()
def report(where: str, model: LlamaForSequenceClassification, tokenizer: AutoTokenizer, problems, draw: random.Random) -> None:
    batch = [answer(draw.choice(problems), draw) for _ in range(512)]
    said, true = judged(model, tokenizer, batch), torch.tensor([value for _, value in batch])
    error, spread = (said - true).square().mean().item(), true.var().item()
    right = ((said > 0.5) == (true > 0.5)).float().mean().item()
    print(f"{where}: squared error {error:.4f} (a constant: {spread:.4f}), right about {right:.1%} being better than 0.5")


if __name__ == "__main__":
    main()
