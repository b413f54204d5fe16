"""How many floating-point operations a batch needs, whoever computes it. Knows no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rollyard.config import LoraConfig
from rollyard.model.architecture import Architecture
from rollyard.types import Sample, TrainBatch

ADAM_FLOPS = 14  # a parameter: both moments 3 + 4, root and quotient 4, decay and step 3
ADAM_NUMBERS = 7  # a parameter: reads weight, gradient and both moments, writes all but the gradient


@dataclass(frozen=True, slots=True)
class Gemm:
    """`count` products y `[rows, columns]` = x `[rows, inner]` w `[inner, columns]` of the forward pass."""

    rows: int
    inner: int
    columns: int
    count: int

    @property
    def flops(self) -> int:
        """Forward, and backward towards x and towards w: three products, two operations for each multiply-add."""
        return 3 * 2 * self.rows * self.inner * self.columns * self.count


def gemms(
    batch: TrainBatch, architecture: Architecture, chunks: Callable[[int], Iterable[int]] = lambda rows: (rows,)
) -> tuple[Gemm, ...]:
    """The matrix products of one training step, micro-batch by micro-batch.

    Each linear of each layer over the tokens that have to be computed: of a micro-batch's samples each different prompt
    once, and all that follows it but for the last token, which predicts nothing. The head over the trained tokens.

    Args:
        chunks: trained tokens of a micro-batch -> the tokens of each of the head's products; one product for all without it.
    """
    hidden, queries = architecture.hidden_size, architecture.heads * architecture.head_dim
    keys, wide = architecture.kv_heads * architecture.head_dim, architecture.feed_forward
    attention = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden)]
    found: Counter[tuple[int, int, int]] = Counter()
    for micro in batch.micro_batches:
        rows = sum(prompt + sum(own) for prompt, own in _computed(micro))
        if not rows:
            continue
        for inner, columns in (*attention, (hidden, wide), (hidden, wide), (wide, hidden)):
            found[rows, inner, columns] += architecture.layers
        for trained in chunks(sum(sum(sample.mask) for sample in micro)):
            found[trained, hidden, architecture.vocab_size] += 1
    return tuple(Gemm(*shape, count) for shape, count in found.items())


def attention_flops(batch: TrainBatch, architecture: Architecture) -> int:
    """Scores and weighted values of all layers, each token with its own past only; forward, and twice that backward."""
    pairs = sum(
        _pairs(prompt) + sum(_pairs(tokens) + tokens * prompt for tokens in own)
        for micro in batch.micro_batches
        for prompt, own in _computed(micro)
    )
    return 3 * 2 * 2 * pairs * architecture.heads * architecture.head_dim * architecture.layers


def adapter_numbers(architecture: Architecture, lora: LoraConfig) -> int:
    """How many numbers an adapter has."""
    hidden, queries = architecture.hidden_size, architecture.heads * architecture.head_dim
    keys, wide = architecture.kv_heads * architecture.head_dim, architecture.feed_forward
    sides = {
        "q_proj": hidden + queries, "k_proj": hidden + keys, "v_proj": hidden + keys, "o_proj": queries + hidden,
        "gate_proj": hidden + wide, "up_proj": hidden + wide, "down_proj": wide + hidden,
    }  # fmt: skip
    return architecture.layers * lora.rank * sum(sides[name] for name in lora.modules)


def adapted_flops(batch: TrainBatch, architecture: Architecture, numbers: int) -> int:
    """Of the matrix products of a training step with an adapter of so many numbers around weights that are frozen.

    Forward and backward towards x for the weights, and all three for the adapter.
    """
    rows = sum(prompt + sum(own) for micro in batch.micro_batches for prompt, own in _computed(micro))
    return 2 * sum(gemm.flops for gemm in gemms(batch, architecture)) // 3 + 3 * 2 * rows * numbers


def pass_flops(architecture: Architecture, tokens: int, heads: int, pairs: int) -> int:
    """Of forward passes: two for each weight of a linear layer and token, and for each pair of tokens that attend.

    Counted as Kaplan et al. (2020) do, without embeddings, norms and what is done element by element.

    Args:
        tokens: that are computed.
        heads: of them, those that the head predicts from.
        pairs: of a token with itself and each before it.
    """
    queries, keys = architecture.heads * architecture.head_dim, architecture.kv_heads * architecture.head_dim
    layer = architecture.hidden_size * (2 * queries + 2 * keys + 3 * architecture.feed_forward)
    linear = 2 * (tokens * architecture.layers * layer + heads * architecture.hidden_size * architecture.vocab_size)
    return linear + 2 * 2 * pairs * queries * architecture.layers


def _pairs(tokens: int) -> int:
    """Of each token with itself and those before it."""
    return tokens * (tokens + 1) // 2


def _computed(samples: Iterable[Sample]) -> list[tuple[int, list[int]]]:
    """Tokens of each different prompt, and of what each of its samples adds: those that are input to the model."""
    found: dict[tuple[int, ...], list[int]] = {}
    for sample in samples:
        if any(sample.mask):
            prompt = sample.token_ids[: sample.mask.index(True)]
            found.setdefault(prompt, []).append(len(sample.token_ids) - len(prompt) - 1)
    return [(len(prompt), own) for prompt, own in found.items()]
