"""Several judges as one: each is asked at once, and the verdict is the sum of theirs by weight."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollyard.errors import ConfigError
from rollyard.protocols.rollouts import Scorer
from rollyard.types import LARGEST, Completion, Prompt, Reward

NAME = re.compile(r"[\w.-]+")  # metrics are called reward/NAME/...


@dataclass(frozen=True, slots=True)
class Part:
    """One judge of several. A weight of 0: what it says is told, and counts for nothing."""

    name: str
    scorer: Scorer
    weight: float = 1.0


class Combined:
    """Asks all its parts (protocols.Scorer).

    Args:
        parts: at least one, with names of their own.

    Raises ConfigError when two have one name, or none counts.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        check_parts([(part.name, part.weight) for part in parts])
        self._parts = tuple(parts)
        self._weights = {part.name: part.weight for part in parts}

    async def score(self, prompt: Prompt, completion: Completion) -> Reward:
        """Raises ScoringError when a part cannot judge any more."""
        asked = [asyncio.ensure_future(part.scorer.score(prompt, completion)) for part in self._parts]
        try:
            verdicts = await asyncio.gather(*asked)
        finally:
            for one in asked:
                one.cancel()  # the others, where one has failed
        return combine(dict(zip(self._weights, verdicts, strict=True)), self._weights)

    async def close(self) -> None:
        await asyncio.gather(*(part.scorer.close() for part in self._parts))


def combine(verdicts: Mapping[str, Reward], weights: Mapping[str, float]) -> Reward:
    """sum(weight x verdict) over the parts. Without a verdict of each that has a weight there is none in all.

    Args:
        verdicts: by part. One that is no finite float32 number is none.
        weights: by part.

    Example, with the weights 1 and 0.2: Reward(1.0) of "right" and Reward(-0.5) of "short" make Reward(0.9, parts=...).
    """
    known = {name: verdict.value for name, verdict in verdicts.items() if verdict.value is not None}
    parts = {name: value for name, value in known.items() if abs(value) <= LARGEST}
    missing = [name for name in verdicts if weights[name] and name not in parts]
    if missing:
        several = len(verdicts) > 1
        causes = [verdicts[name].problem or f"{verdicts[name].value} is no verdict" for name in missing]
        told = [f"{name}: {cause}" if several else cause for name, cause in zip(missing, causes, strict=True)]
        return Reward(None, parts, "; ".join(told))
    weighed = {name: weights[name] * value for name, value in parts.items()}
    for name, value in weighed.items():
        if not abs(value) <= LARGEST:
            return Reward(None, parts, f"{name} by its weight, {value:g}, is no finite float32 number")
    total = math.fsum(weighed.values())
    if not abs(total) <= LARGEST:
        return Reward(None, parts, f"the sum of all parts, {total:g}, is no finite float32 number")
    return Reward(total, parts)


def check_parts(parts: Sequence[tuple[str, float]]) -> None:
    """`parts` are names and weights. Raises ConfigError when two have one name, one is no name of a metric, or none counts."""
    names = [name for name, _ in parts]
    odd = next((name for name in names if not NAME.fullmatch(name)), None)
    if odd is not None:
        remedy = "give it a name of letters, digits and _ - . alone"
        raise ConfigError(f"a reward cannot be called {odd!r}", where="reward.function", remedy=remedy)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        remedy = "rename one of them; in Python, give a mapping of names to functions"
        raise ConfigError(f"two rewards are called {twice!r}", where="reward.function", remedy=remedy)
    if not any(weight for _, weight in parts):
        problem = "no reward counts: all weights are 0" if parts else "there is no reward"
        raise ConfigError(problem, where="reward.weights", remedy="give one of them a weight")
