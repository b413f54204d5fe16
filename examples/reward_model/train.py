"""Trains a small reward model for sums of two digits from reasoning-gym, and says how good it is.

    python examples/reward_model/train.py --tokenizer models/smollm2-135m --out models/sum-judge

It learns what the task's own rule gives an answer, from answers that are made up here: right ones, wrong ones, and either
with something behind it. Problems that runs hold out are held out here too. Then `reward.model.folder` may name it.
"""

import argparse
import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from rollyard import gym

TASK, OPTIONS = "reasoning_gym/chain_sum", '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}'
LEAST, MOST = -9, 18  # sums
BEHIND = [".", "?", " is the answer", " and so on", ". The answer", " (the sum)", " = 7", ", because", " 3"]
INSTEAD = ["", "?", "the answer", "a number", "x", "to solve this"]
SHAPE = {"hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256}
Answer = tuple[gym.Problem, str, float]  # to a problem, and its reward


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small reward model for one-digit sums, and say how good it is.")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with the tokenizer that it takes")
    parser.add_argument("--out", type=Path, required=True, help="folder that it is written to")
    parser.add_argument("--steps", type=int, default=600, help="training steps (default: 600)")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.tokenizer, local_files_only=True)
    tokenizer.chat_template = None  # prompt and completion are judged as they are, one after the other
    problems = [gym.training(TASK, OPTIONS, 0, place) for place in range(2000)]
    model = trained(tokenizer, problems, given.steps)
    report("problems it was trained on", model, tokenizer, problems)
    unseen = [problem for problem in gym.held_out(TASK, OPTIONS, 16) if problem is not None]
    report("problems it never saw", model, tokenizer, unseen)
    model.save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)


def trained(tokenizer: AutoTokenizer, problems: list[gym.Problem], steps: int) -> LlamaForSequenceClassification:
    """A model that says what an answer is worth. While it learns that, it also says the sum, at the end of the question."""
    torch.manual_seed(0)
    draw = random.Random(0)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=0.06, num_labels=1, **SHAPE)
    config.problem_type = "regression"
    model, sums = LlamaForSequenceClassification(config), torch.nn.Linear(config.hidden_size, MOST - LEAST + 1)
    model.model.embed_tokens.weight.requires_grad_(False)  # random vectors tell tokens apart, and most are never seen
    learning = [each for each in (*model.parameters(), *sums.parameters()) if each.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=3e-3)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    for step in range(steps):
        batch = [answer(draw.choice(problems), draw) for _ in range(64)]
        worth, hidden = judged(model, tokenizer, batch)
        loss = (worth - torch.tensor([value for _, _, value in batch])).square().mean()
        ends = torch.tensor([len(tokenizer.encode(problem.question)) - 1 for problem, _, _ in batch])
        right = torch.tensor([int(problem.answer or "0") - LEAST for problem, _, _ in batch])
        added = cross_entropy(sums(hidden[torch.arange(len(batch)), ends]), right)
        optimizer.zero_grad()
        (loss + 0.5 * added).backward()
        optimizer.step()
        falling.step()
        if step % 100 == 0:
            print(f"step {step}: squared error {loss.item():.4f}, sums {added.item():.3f} nats", flush=True)
    return model


def answer(problem: gym.Problem, draw: random.Random) -> Answer:
    """One that may be right, with what the task itself gives it."""
    right = int(problem.answer or "0")
    number = draw.choice([right, right, right + draw.randint(-3, 3), draw.randint(LEAST, MOST)])
    behind = draw.choice(["", "", draw.choice(BEHIND)])
    text = f" {number}{behind}" if draw.random() < 0.9 else f" {draw.choice(INSTEAD)}"
    return problem, text, gym.score(problem.source, problem.entry, text)


def judged(
    model: LlamaForSequenceClassification, tokenizer: AutoTokenizer, batch: list[Answer]
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model says of each, `[answers]`, and what it thinks at every token, `[answers, tokens, width]`."""
    rows = [tokenizer.encode(problem.question + text) for problem, text, _ in batch]
    width, ends = max(map(len, rows)), torch.tensor([len(row) - 1 for row in rows])
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])  # a decoder does not look at what follows
    hidden = model.model(ids).last_hidden_state
    return model.score(hidden[torch.arange(len(rows)), ends])[:, 0], hidden


@torch.inference_mode()
def report(where: str, model: LlamaForSequenceClassification, tokenizer: AutoTokenizer, problems: list[gym.Problem]) -> None:
    draw = random.Random(1)
    batch = [answer(draw.choice(problems), draw) for _ in range(512)]
    said, true = judged(model, tokenizer, batch)[0], torch.tensor([value for _, _, value in batch])
    error, spread = (said - true).square().mean().item(), true.var(correction=0).item()
    right = ((said > 0.5) == (true > 0.5)).float().mean().item()
    print(f"{where}: squared error {error:.4f} (a constant: {spread:.4f}), right about {right:.1%} being better than 0.5")


if __name__ == "__main__":
    main()
