"""What an evaluation comes to."""

from __future__ import annotations

import math

from rollyard.evaluate import Evaluation
from rollyard.types import Reward


def test_means_are_over_those_that_have_a_verdict():
    """Four completions were asked, three judged, one of them without a verdict in all: that one has a number by name."""
    rewards = [
        Reward(1.0, {"right": 1.0, "short": 0.0}),
        Reward(0.5, {"right": 0.5}),
        Reward(None, {"short": 0.5}),
        Reward(math.inf),
    ]
    assert Evaluation.of(rewards, 5) == Evaluation(0.75, 5, 3, {"right": 0.75, "short": 0.25})


def test_nobody_judged():
    assert Evaluation.of([], 2) == Evaluation(None, 2, 2, {})
