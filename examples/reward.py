"""Rewards for arithmetic.jsonl: rollyard run --prompts examples/arithmetic.jsonl --reward examples/reward.py:exact_number"""

import re

NUMBER = re.compile(r"(?<!\d)-?\d+(?:,\d{3})*(?:\.\d+)?")  # in "7-2" the minus is no sign


def exact_number(prompt: str, completion: str, answer: str, **columns: object) -> float:
    """1 when the last number written is the answer, else 0."""
    written = NUMBER.findall(completion)
    return float(bool(written) and float(written[-1].replace(",", "")) == float(answer))
