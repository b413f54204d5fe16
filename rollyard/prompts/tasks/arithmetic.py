"""Sums of two two-digit numbers.

Numbers are zero-padded, and the answer's three digits come lowest first, so that each digit needs only what is to its
left: that is what a tiny model learns quickly.
"""

from __future__ import annotations

import random

ALPHABET = "0123456789Solve +="


def add(numbers: random.Random) -> tuple[str, str]:
    """ "Solve 07+95=" -> "201", for 102."""
    left, right = numbers.randrange(100), numbers.randrange(100)
    return f"Solve {left:02}+{right:02}=", f"{left + right:03}"[::-1]
