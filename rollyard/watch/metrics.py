"""Statistics of the groups of one step (PURE). docs/metrics.md defines each.

All are over the whole batch, whatever ranks it was split over. A member without a verdict has written tokens, so it is in
what is told of lengths; it has no reward, so it is in nothing that is told of rewards, neither above nor below the line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, hypot, isfinite, sqrt
from typing import Final

from rollyard.types import FinishReason, Group, Rollout

UNSCORED: Final = "unscored"  # members without a verdict


def has_verdict(rollout: Rollout) -> bool:
    """A reward that is not finite is none."""
    return rollout.reward.value is not None and isfinite(rollout.reward.value)


def verdicts(group: Group) -> list[float]:
    """Rewards of the members that have one. One that is not finite is no verdict."""
    return [value for value in group.rewards if value is not None and isfinite(value)]


def parts(group: Group, name: str) -> list[float]:
    """The numbers that the reward of this name gave to the group's members, those of members without a verdict too."""
    found = (rollout.reward.parts.get(name) for rollout in group.rollouts)
    return [value for value in found if value is not None and isfinite(value)]


def part_names(groups: Iterable[Group]) -> list[str]:
    """Of all rewards that gave a number, in the order of the first that was seen."""
    return list(dict.fromkeys(name for group in groups for each in group.rollouts for name in each.reward.parts))


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Of one reward, over the members and groups that have a number of it. None where there is none."""

    mean: float | None
    std: float | None  # of all members together; divided by their number
    flat: int  # groups whose numbers are all equal
    groups: int  # that have a number
    least: float | None = None
    most: float | None = None

    @classmethod
    def of(cls, groups: Sequence[Sequence[float]]) -> RewardStats:
        """Args:
        groups: the numbers of each, `[groups][members that have one]`.
        """
        known = [group for group in groups if group]
        values = [value for group in known for value in group]
        if not values:
            return cls(None, None, 0, 0)
        mean = fsum(values) / len(values)
        flat = sum(len(set(group)) == 1 for group in known)
        if len(set(values)) == 1:  # whatever the rounding of a mean would say
            return cls(values[0], 0.0, flat, len(known), values[0], values[0])
        std = hypot(*(value - mean for value in values)) / sqrt(len(values))  # hypot scales first: no square overflows
        return cls(mean, std, flat, len(known), min(values), max(values))

    @classmethod
    def whole(cls, groups: Iterable[Group]) -> RewardStats:
        """Of the combined reward."""
        return cls.of([verdicts(group) for group in groups])

    @classmethod
    def part(cls, groups: Iterable[Group], name: str) -> RewardStats:
        """Of the reward of this name."""
        return cls.of([parts(group, name) for group in groups])

    @property
    def flat_share(self) -> float | None:
        return self.flat / self.groups if self.groups else None


@dataclass(slots=True)
class LengthCounts:
    """Completions by the tokens that were sampled for them, and how many were cut off. They can be added up."""

    tokens: Counter[int]
    truncated: int = 0

    @classmethod
    def of(cls, groups: Iterable[Group]) -> LengthCounts:
        found = cls(Counter())
        for group in groups:
            for rollout in group.rollouts:
                found.add(len(rollout.completion.token_ids), rollout.completion.finish)
        return found

    def add(self, tokens: int, finish: FinishReason) -> None:
        self.tokens[tokens] += 1
        self.truncated += finish.truncated

    @property
    def completions(self) -> int:
        return sum(self.tokens.values())

    @property
    def sum(self) -> int:
        """Tokens of all completions."""
        return sum(length * often for length, often in self.tokens.items())

    @property
    def mean(self) -> float | None:
        return self.sum / self.completions if self.tokens else None

    @property
    def truncated_share(self) -> float | None:
        return self.truncated / self.completions if self.tokens else None

    def percentile(self, percent: int) -> int | None:
        return percentile(self.tokens, percent)


def percentile(histogram: Mapping[int, int], percent: int) -> int | None:
    """Nearest rank: the smallest value that at least `percent` of all are not above. None of nothing.

    Args:
        histogram: how often each value occurs.
    """
    rank = -(-percent * sum(histogram.values()) // 100)
    for value in sorted(histogram):
        rank -= histogram[value]
        if rank <= 0:
            return value
    return None


def of_rewards(groups: Sequence[Group]) -> Iterator[tuple[str, object]]:
    """The metrics of the combined reward, and of each by its name."""
    whole = RewardStats.whole(groups)
    yield "reward_mean", whole.mean
    yield "reward_std", whole.std
    yield "reward_min", whole.least
    yield "reward_max", whole.most
    yield "flat_groups", whole.flat
    yield "flat_share", whole.flat_share
    yield UNSCORED, sum(not has_verdict(rollout) for group in groups for rollout in group.rollouts)
    for name in part_names(groups):
        found = RewardStats.part(groups, name)
        yield f"reward/{name}/mean", found.mean
        yield f"reward/{name}/std", found.std
        yield f"reward/{name}/flat_share", found.flat_share


def of_lengths(groups: Sequence[Group]) -> Iterator[tuple[str, object]]:
    """The metrics of what was read and written for these groups."""
    lengths, several = LengthCounts.of(groups), len(groups)
    yield "completion_tokens_mean", lengths.mean
    for percent in (50, 95):
        yield f"completion_tokens_p{percent}", lengths.percentile(percent)
    yield "completion_tokens_max", lengths.percentile(100)
    yield "completion_truncated_share", lengths.truncated_share
    turns = [len(rollout.completion.turns) or 1 for group in groups for rollout in group.rollouts]
    yield "turns_mean", sum(turns) / len(turns) if turns else None
    yield "tokens_per_prompt", lengths.sum / several if several else None
    yield "prompt_tokens_mean", sum(len(group.prompt.token_ids) for group in groups) / several if several else None
