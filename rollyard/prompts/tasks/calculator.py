"""Products that a tiny model cannot compute, and a tool that can: the environment `calculator` answers calls such as [17*23].

The base policy was shown both: now and then a call and what to make of its result, else the answer at once, which it does not
learn to guess.
"""

from __future__ import annotations

import random

ALPHABET = "0123456789*=[]"
CALLS = 0.25  # share of the lessons with a call


def multiply(numbers: random.Random) -> tuple[str, str]:
    """ "17*23=" -> "391"."""
    left, right = numbers.randrange(10, 100), numbers.randrange(10, 100)
    return f"{left}*{right}=", str(left * right)


def lessons(prompt: str, answer: str, numbers: random.Random) -> list[tuple[str, str]]:
    """ "17*23=" -> "[17*23]" and "17*23=[17*23]391=" -> "391", or "17*23=" -> "391"."""
    if numbers.random() >= CALLS:
        return [(prompt, answer)]
    call = f"[{prompt[:-1]}]"
    return [(prompt, call), (f"{prompt}{call}{answer}=", answer)]
