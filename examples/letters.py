"""A second reward for the sort demo: rollyard run --preset sort --reward exact_match,examples/letters.py:same_letters"""


def same_letters(prompt: str, completion: str, answer: str, **columns: object) -> float:
    """1 when each letter of the answer is written once and no other, in whatever order, else 0."""
    return float(sorted(completion) == sorted(answer))
