"""A second reward for the sort demo: rollyard run --preset sort --reward exact_match,examples/letters.py:in_order"""


def in_order(prompt: str, completion: str, **columns: object) -> float:
    """1 for letters in alphabetical order, none of them twice, whatever the prompt was; else 0."""
    return float(completion.isalpha() and list(completion) == sorted(set(completion)))
