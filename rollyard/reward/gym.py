"""The reward of a task of reasoning-gym: its own judgement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollyard import gym


def reasoning_gym(prompt: str, completion: str, problem: Mapping[str, Any]) -> float:
    """What the dataset's own `score_answer` says of the answer in a completion, 0 to 1.

    Args:
        problem: the column that such a task gives its prompts: `source` and `entry` of the problem.
    """
    return gym.score(gym.Source(*problem["source"]), problem["entry"], completion)
