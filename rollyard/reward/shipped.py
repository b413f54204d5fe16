"""Rewards that ship: each a small function of texts, to be named without a file."""

from __future__ import annotations


def exact_match(prompt: str, completion: str, answer: object) -> float:
    """1 when the completion is the answer and nothing else, 0 otherwise. Judges the built-in tasks."""
    return float(completion == text_of(answer))


def text_of(answer: object) -> str:
    """A text, or a whole number as one. Raises TypeError for all else: 0.5 and "0.50" may or may not be meant to be one."""
    if isinstance(answer, bool) or not isinstance(answer, (str, int)):
        raise TypeError(f"the answer {answer!r} is neither a text nor a whole number")
    return str(answer)
