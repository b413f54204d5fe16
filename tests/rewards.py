"""Rewards of runs in tests. Worker processes import this, and so nothing else."""

import time


def share_of_a(prompt: str, completion: str, **columns: object) -> float:
    """Seldom the same twice."""
    return completion.count("a") / (1 + len(completion))


def share_of_answer(prompt: str, completion: str, answer: str) -> float:
    return completion.count(answer) / 6


def moody(prompt: str, completion: str) -> float:
    if "b" in completion:
        raise ValueError("no number in it")
    return float(len(completion))


def patient(prompt: str, completion: str, **columns: object) -> float:
    time.sleep(0.01)
    return float(len(completion) % 2)
