"""Do two sides write the same greedy tokens? They must, but for tokens that tie within rounding."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from rollyard.bench.peer import PeerError
from rollyard.bench.result import Agreement, Difference

if TYPE_CHECKING:
    from rollyard.model.transformer import CausalLM

# Nats that two tokens may be apart. In float32, logits of two implementations differ by about 1e-4.
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5}

Tokens = Sequence[Sequence[int]]  # [prompts][tokens]
Gap = Callable[[Sequence[int], int, int], Awaitable[float]]


async def compare(prompts: Tokens, ours: Tokens, theirs: Tokens, gap: Gap, near: float) -> Agreement:
    """Compare greedy completions up to each prompt's first difference; what follows has another context.

    Args:
        gap: `(context, token, other)` -> how much likelier `token` is than `other` after the context, in nats.
        near: nats that two tokens may be apart.

    Raises:
        PeerError: a difference that is no near tie.
    """
    agreed, differences = 0, []
    for number, (prompt, mine, other) in enumerate(zip(prompts, ours, theirs, strict=True)):
        place = _first_difference(mine, other)
        agreed += place
        if place == len(mine):
            continue
        nats = abs(await gap([*prompt, *mine[:place]], mine[place], other[place]))
        if not nats <= near:
            problem = f"greedy token {place} of prompt {number} is {mine[place]} here and {other[place]} there"
            raise PeerError(f"{problem}, {nats:.2g} nats apart: the sides do not compute the same model")
        differences.append(Difference(number, place, nats))
    return Agreement(sum(map(len, ours)), agreed, tuple(differences))


def logit_gap(model: CausalLM, context: Sequence[int], token: int, other: int) -> float:
    """By a plain forward pass of the whole context: no cache, no packed weights, torch's own attention."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    with torch.inference_mode():
        ids = torch.tensor(context, device=model.head_weight.device)
        hidden = model.hidden(ids, torch.arange(len(context), device=ids.device), attend)
        logits = model.logits(hidden[-1:])[0]
    return float(logits[token] - logits[other])


def _first_difference(mine: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(mine, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(mine))
