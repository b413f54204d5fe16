"""Does an engine decode with the weights that it was given? A few logprobs tell, compared with the trainer's own.

The engine is asked for one token after each of some fixed prompts; the trainer knows the logprob of every token there.
That is the path of real requests: no engine needs anything extra for it, and no packed copy is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from rollyard.model.attention import Tree, packed_attention
from rollyard.model.transformer import CausalLM
from rollyard.types import Request, RequestId, Sampling

PROMPTS = 16
PROMPT_TOKENS = 8
FIRST_GROUP = -(2**40)  # ids far from those of rollouts and evaluations
LEAST_NOISE = 1e-6  # nats: float32 kernels that sum in another order differ by this much


class Verdict(StrEnum):
    """What a probe says of one load."""

    VERIFIED = "verified"  # nearer the new logprobs than the old ones, by more than noise
    UNDECIDABLE = "undecidable"  # new and old logprobs are too near each other to tell
    CONTRADICTED = "contradicted"  # nearer the old ones, by more than noise


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine said after one prompt."""

    token: int
    logprob: float


def prompts(vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """The same ones for every model of this vocabulary."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator)
    return tuple(map(tuple, ids.tolist()))


def requests(vocabulary: int, attempt: int) -> tuple[Request, ...]:
    """One token after each prompt, drawn from the model's own distribution."""
    sampling = Sampling(1, ignore_eos=True)
    return tuple(
        Request(RequestId(FIRST_GROUP - number, 0, attempt), ids, sampling, seed=number)
        for number, ids in enumerate(prompts(vocabulary))
    )


@torch.no_grad()
def table(model: CausalLM) -> Tensor:
    """`[PROMPTS, vocab]` float32 on the CPU: logprobs of the token after each prompt, by the trainer's forward pass."""
    return logprobs(model).cpu()


def logprobs(model: CausalLM, head: Tensor | None = None) -> Tensor:
    """The same, differentiable where gradients are on; `head` `[vocab, hidden]` instead of the model's."""
    device = model.head_weight.device
    ids = torch.tensor(prompts(model.architecture.vocab_size), device=device)
    attend = packed_attention([Tree(PROMPT_TOKENS)] * PROMPTS, device)
    positions = torch.arange(PROMPT_TOKENS, device=device).repeat(PROMPTS)
    hidden = model.hidden(ids.view(-1), positions, attend)[PROMPT_TOKENS - 1 :: PROMPT_TOKENS]
    logits = model.logits(hidden) if head is None else F.linear(hidden, head).float()
    return logits.log_softmax(dim=-1)


def distance(answers: Sequence[Answer], expected: Tensor) -> float:
    """Root mean square of the differences in logprob, in nats. Infinite when one is no number."""
    squares = [(answer.logprob - float(expected[row, answer.token])) ** 2 for row, answer in enumerate(answers)]
    mean = math.fsum(squares) / len(squares)
    return math.sqrt(mean) if math.isfinite(mean) else math.inf


def judge(answers: Sequence[Answer], new: Tensor, old: Tensor, noise: float) -> Verdict:
    """Which of two versions an engine decodes with.

    Args:
        new, old: tables of the two.
        noise: nats; the distance of this engine to the trainer when both had the same weights.
    """
    nearer = distance(answers, old) - distance(answers, new)
    margin = 2 * max(noise, LEAST_NOISE)
    if nearer > margin:
        return Verdict.VERIFIED
    return Verdict.CONTRADICTED if -nearer > margin else Verdict.UNDECIDABLE
