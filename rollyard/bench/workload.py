"""What is measured: prompts and lengths that every side gets alike (PURE)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

MEDIAN, SIGMA, CAP = 40, 1.0, 384  # of ragged lengths, in tokens: lognormal, cut at CAP
GREEDY = 4  # prompts of the comparison of greedy tokens
GREEDY_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload without its tokens. `tokens` 0: lengths are drawn, lognormal."""

    groups: int
    size: int  # completions of each prompt
    prompt: tuple[int, int]  # tokens of a prompt, shortest and longest
    tokens: int  # of each completion
    batch: int = 64  # sequences of one call of Hugging Face `generate`

    @property
    def requests(self) -> int:
        return self.groups * self.size

    @property
    def window(self) -> int:
        """Tokens that the longest prompt with the longest completion may have."""
        return self.prompt[1] + (self.tokens or CAP)


SHAPES = {
    "64x1": Shape(64, 1, (24, 40), 128),
    "8x8": Shape(8, 8, (24, 40), 128),
    "one": Shape(1, 1, (32, 32), 128),
    "ragged": Shape(64, 1, (8, 48), 0, batch=16),
    "prefix": Shape(8, 8, (256, 256), 16),
}
QUEUE = Shape(64, 1, (8, 48), 64)  # of which 64 to 1,024 are queued


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, the members of a group one after the other."""

    prompts: tuple[tuple[int, ...], ...]  # [requests][tokens]
    lengths: tuple[int, ...]  # [requests], tokens to write
    size: int = 1  # requests of one group
    temperature: float = 1.0
    batch: int = 64  # sequences of one call of Hugging Face `generate`

    @property
    def tokens(self) -> int:
        """Tokens to write in all."""
        return sum(self.lengths)

    def shortened(self, tokens: int) -> Workload:
        """The same requests with at most `tokens` each: for warming up."""
        return replace(self, lengths=tuple(min(length, tokens) for length in self.lengths))


def build(shape: Shape, vocabulary: int, number: int) -> Workload:
    """The workload of round `number`: its own tokens, so that no cache of an earlier round helps; the lengths of every round."""
    sizes, tokens = random.Random("prompt lengths"), random.Random(f"prompts/{number}")
    ordinary = range(min(64, vocabulary // 2), vocabulary)  # special tokens are among the first ids
    prompts = [tuple(tokens.choices(ordinary, k=sizes.randint(*shape.prompt))) for _ in range(shape.groups)]
    return Workload(
        prompts=tuple(prompt for prompt in prompts for _ in range(shape.size)),
        lengths=lengths(shape),
        size=shape.size,
        batch=shape.batch,
    )


def lengths(shape: Shape) -> tuple[int, ...]:
    """Tokens to write for each request `[requests]`."""
    if shape.tokens:
        return (shape.tokens,) * shape.requests
    rng = random.Random("lengths")
    drawn = (round(rng.lognormvariate(math.log(MEDIAN), SIGMA)) for _ in range(shape.requests))
    return tuple(min(max(length, 1), CAP) for length in drawn)


def greedy(vocabulary: int) -> Workload:
    """A few prompts whose greedy tokens two engines should agree on."""
    shape = Shape(GREEDY, 1, (24, 40), GREEDY_TOKENS)
    return replace(build(shape, vocabulary, number=-1), temperature=0.0)
