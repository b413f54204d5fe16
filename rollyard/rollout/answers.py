"""What is wrong with an engine's answer (PURE).

Whoever hears it looks at each token, and tells the core what it found with the answer. The core looks at counts and versions:
what it does for an answer costs the same however long that is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollyard.types import Segment

LEAST = -3.4028234663852886e38  # the lowest float32
ROUNDING = 1e-3  # nats above 0 that a logprob may have where logits are rounded
NUMBERS = 2**32  # that a tokenizer takes for a token: others it cannot even be asked for the text of


def wrong_tokens(segment: Segment, vocabulary: int = 0) -> str:
    """What is wrong with its tokens and logprobs, each for itself; empty when nothing is.

    Args:
        vocabulary: tokens have lower numbers; 0: nobody knows.
    """
    return _wrong_ids(segment.token_ids, vocabulary) or _wrong_logprobs(segment.logprobs)


def _wrong_ids(ids: Sequence[int], vocabulary: int) -> str:
    """Looked at whatever came with them: a tokenizer may be asked for their text before anybody counts."""
    if not ids or (min(ids) >= 0 and max(ids) < (vocabulary or NUMBERS)):
        return ""
    wrong, has = (min(ids) if min(ids) < 0 else max(ids)), vocabulary or "none below 0, and none from 2**32 on"
    return f"a token of number {wrong}, and the vocabulary has {has}"


def _wrong_logprobs(logprobs: Sequence[float]) -> str:
    if not logprobs:
        return ""
    total = sum(logprobs)
    if not math.isfinite(total):
        return "a logprob is not finite"
    if total < LEAST and min(logprobs) < LEAST:
        return f"a logprob is {min(logprobs):g}, below what 32 bits can hold"
    if max(logprobs) > ROUNDING:
        return f"a logprob is {max(logprobs):g}, above 0"
    return ""


def problem_of(segment: Segment, left: int, oldest_allowed: int, found: str = "") -> str:
    """What is wrong with an engine's answer; empty when nothing is.

    Args:
        left: tokens that the member may still write.
        oldest_allowed: version step.
        found: what `wrong_tokens` said.
    """
    tokens = len(segment.token_ids)
    if len(segment.logprobs) != tokens:
        return f"{tokens} tokens came with {len(segment.logprobs)} logprobs"
    if not tokens:
        return ""
    if tokens > left:
        return f"more tokens than asked: {left} were left to write"
    if found:
        return found
    if segment.version.step < oldest_allowed:
        return f"tokens of version {segment.version.step}, but {oldest_allowed} is the oldest allowed"
    return ""
