"""What users iterate over: one record a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from math import fsum, isfinite

from rollyard.types import Group, Rollout, TrainStats, WeightVersion
from rollyard.watch.timeline import PhaseSeconds


def has_verdict(rollout: Rollout) -> bool:
    """A reward that is not finite is none."""
    return rollout.reward.value is not None and isfinite(rollout.reward.value)


def verdicts(group: Group) -> list[float]:
    """Rewards of the members that have one. One that is not finite is no verdict."""
    return [value for value in group.rewards if value is not None and isfinite(value)]


def mean_reward(groups: Iterable[Group]) -> float | None:
    """Mean over the members that have a verdict; None when no member has one."""
    values = [value for group in groups for value in verdicts(group)]
    return fsum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step, and the rollouts it learned from.

    Example: `for step in run: print(step.step, step.reward_mean, len(step.groups))`.
    """

    step: int  # 1 for the first
    version: WeightVersion  # the weights after it
    groups: tuple[Group, ...]
    train: TrainStats
    phases: PhaseSeconds  # of this step alone
    tokens: int  # sampled for rollouts during this step, whatever became of them
    dropped: Mapping[str, int]  # prompts dropped during this step, by reason
    unchanged: float | None = None  # share of the weights' numbers that the version sent last did not change (weights.delta)

    @property
    def reward_mean(self) -> float | None:
        """Over the members that have a verdict; None when no member has one."""
        return mean_reward(self.groups)

    @property
    def seconds(self) -> float:
        """Wall time of the whole step."""
        return self.phases.wall_s

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second of generation; 0 when there was none."""
        return self.tokens / self.phases.generating_s if self.phases.generating_s else 0.0

    @property
    def flat_groups(self) -> int:
        """Groups whose rewards are all equal: nothing is learned from them."""
        return sum(len(set(verdicts(group))) <= 1 for group in self.groups)

    def to_metrics(self) -> dict[str, object]:
        """A flat record for sinks. Times in seconds; `train/...` is described in `TrainStats`."""
        lengths = [len(rollout.completion.token_ids) for group in self.groups for rollout in group.rollouts]
        train = {f"train/{name}": value for name, value in asdict(self.train).items() if name != "step"}
        return {
            "step": self.step,
            "incarnation": self.version.incarnation,
            "reward_mean": self.reward_mean,
            "groups": len(self.groups),
            "flat_groups": self.flat_groups,
            "completion_tokens_mean": sum(lengths) / len(lengths) if lengths else None,
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "weights_unchanged": self.unchanged,
            "dropped": sum(self.dropped.values()),
            **{f"dropped/{reason}": count for reason, count in self.dropped.items()},
            **train,
            "seconds": self.seconds,
            **{f"phase/{name}_s": seconds for name, seconds in self.phases.parts().items()},
        }
