"""What users iterate over: one record a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isnan

from rollyard.types import Group, TrainStats, WeightVersion
from rollyard.watch.metrics import UNSCORED, RewardStats, of_lengths, of_rewards
from rollyard.watch.timeline import PhaseSeconds


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
    judged: bool = True  # False: rewards say nothing, since they are not modelled

    @property
    def reward_mean(self) -> float | None:
        """Over the members that have a verdict; None when no member has one, or rewards are not modelled."""
        return RewardStats.whole(self.groups).mean if self.judged else None

    @property
    def seconds(self) -> float:
        """Wall time of the whole step."""
        return self.phases.wall_s

    @property
    def tokens_per_s(self) -> float | None:
        """Sampled tokens per second of generation; None where nothing was sampled."""
        return self.tokens / self.phases.generating_s if self.tokens and self.phases.generating_s else None

    @property
    def flat_groups(self) -> int:
        """Groups whose verdicts are all equal: comparing their members teaches nothing."""
        return RewardStats.whole(self.groups).flat

    def to_metrics(self) -> dict[str, object]:
        """A flat record for sinks. Times in seconds; docs/metrics.md defines each."""
        told = {name: value for name, value in asdict(self.train).items() if name != "step"}
        train = {f"train/{name}": None if value is not None and isnan(value) else value for name, value in told.items()}
        rewards = {name: value if self.judged or name == UNSCORED else None for name, value in of_rewards(self.groups)}
        return {
            "step": self.step,
            "incarnation": self.version.incarnation,
            **rewards,
            "groups": len(self.groups),
            **dict(of_lengths(self.groups)),
            "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s,
            "weights_unchanged": self.unchanged,
            "dropped": sum(self.dropped.values()),
            **{f"dropped/{reason}": count for reason, count in self.dropped.items()},
            **train,
            "seconds": self.seconds,
            **{f"phase/{name}_s": seconds for name, seconds in self.phases.parts().items()},
            **self.phases.beside(),
        }
