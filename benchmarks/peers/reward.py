"""The reward of `bench step`, called by both sides. Any two texts nearly always differ in it, so every group has a gradient."""

import re


def sums(prompt: str, completion: str, answer: str) -> float:
    """1 when the last number is the answer, and a tenth of the share of characters that are vowels."""
    numbers = re.findall(r"\d+", completion)
    right = bool(numbers) and numbers[-1] == answer
    vowels = sum(character in "aeiouAEIOU" for character in completion)
    return float(right) + 0.1 * vowels / max(len(completion), 1)
