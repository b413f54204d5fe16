"""Letters to put in order: answers of very different lengths, so that continuous batching has something to do."""

from __future__ import annotations

import math
import random
import string

ALPHABET = string.ascii_lowercase + "="
SHORTEST, LONGEST, MEDIAN, SIGMA = 2, 24, 6, 0.65  # letters; the length is lognormal


def letters(numbers: random.Random) -> list[str]:
    """Distinct letters in random order."""
    count = round(numbers.lognormvariate(math.log(MEDIAN), SIGMA))
    return numbers.sample(string.ascii_lowercase, min(max(count, SHORTEST), LONGEST))


def sort(numbers: random.Random) -> tuple[str, str]:
    """ "cab=" -> "abc"."""
    drawn = letters(numbers)
    return "".join(drawn) + "=", "".join(sorted(drawn))


def reverse(numbers: random.Random) -> tuple[str, str]:
    """ "cab=" -> "bac"."""
    drawn = letters(numbers)
    return "".join(drawn) + "=", "".join(reversed(drawn))
