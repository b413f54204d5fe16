"""Does an engine decode with the weights that it was given? A few logprobs tell, compared with the trainer's own.

The engine is asked for one token after each of some fixed prompts; the trainer knows the logprob of every token there.
That is the path of real requests: no engine needs anything extra for it, and no packed copy is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from rollyard.model.attention import Tree, packed_attention
from rollyard.model.transformer import CausalLM
from rollyard.types import Answer, Probed, Verdict, WeightVersion

PROMPTS = 16
PROMPT_TOKENS = 8
FAR, FAR_NOISE = 1.0, 10.0  # nats, and times the noise, beyond which it is not the trainer's model, whichever version
LEAST_NOISE = 1e-6  # nats: float32 kernels that sum in another order differ by this much


def prompts(vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """The same ones for every model of this vocabulary."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator)
    return tuple(map(tuple, ids.tolist()))


@torch.no_grad()
def table(model: CausalLM) -> Tensor:
    """`[PROMPTS, vocab]` float32 on the CPU: logprobs of the token after each prompt, by the trainer's forward pass."""
    return _seen(model, logprobs(model))


@torch.no_grad()
def with_head(model: CausalLM, head: Tensor) -> Tensor:
    """The same with another head, `[vocab, hidden]`."""
    return _seen(model, logprobs(model, head))


def _seen(model: CausalLM, found: Tensor) -> Tensor:
    """Of ranks that share the model all take what rank 0 found, and let go of what they gathered for it."""
    model.parts.rest()
    return model.parts.agreed(found.cpu())


def logprobs(model: CausalLM, head: Tensor | None = None) -> Tensor:
    """The same, differentiable where gradients are on; `head` `[vocab, hidden]` instead of the model's."""
    device = model.head_weight.device
    ids = torch.tensor(prompts(model.architecture.vocab_size), device=device)
    attend = packed_attention([Tree(PROMPT_TOKENS)] * PROMPTS, device)
    positions = torch.arange(PROMPT_TOKENS, device=device).repeat(PROMPTS)
    hidden = model.hidden(ids.view(-1), positions, attend)[PROMPT_TOKENS - 1 :: PROMPT_TOKENS]
    logits = model.logits(hidden) if head is None else F.linear(hidden, head).float()
    return logits.log_softmax(dim=-1)


def apart(one: Tensor, other: Tensor) -> float:
    """How far two tables are from each other, in nats: root mean square over prompts, tokens weighed by how likely they are."""
    return float((other.exp() * (one - other).square()).sum(dim=1).mean().sqrt())


def distance(answers: Sequence[Answer], expected: Tensor) -> float:
    """Root mean square of the differences in logprob, in nats. Infinite when one is no number."""
    squares = [(answer.logprob - float(expected[row, answer.token])) ** 2 for row, answer in enumerate(answers)]
    mean = math.fsum(squares) / len(squares)
    return math.sqrt(mean) if math.isfinite(mean) else math.inf


def judge(answers: Sequence[Answer], own: Tensor, others: Mapping[WeightVersion, Tensor], noise: float) -> Probed:
    """Does an engine decode with its version, or with another one?

    Args:
        own, others: tables.
        noise: nats; the distance of this engine to the trainer when both had the same weights.
    """
    there = distance(answers, own)
    apart_from = {version: distance(answers, table) for version, table in others.items()}
    nearest = min(apart_from, key=apart_from.__getitem__, default=None)
    before = math.inf if nearest is None else apart_from[nearest]
    nearer, margin = before - there, 2 * max(noise, LEAST_NOISE)
    verdict = Verdict.UNDECIDABLE
    if not there <= max(FAR, FAR_NOISE * noise):
        verdict, nearest = Verdict.CONTRADICTED, nearest if -nearer > margin else None
    elif nearest is not None and nearer > margin:
        verdict = Verdict.VERIFIED
    elif -nearer > margin:
        verdict = Verdict.CONTRADICTED
    return Probed(verdict, there, before, nearest)
