"""From judged groups to training rows and steps, as a run does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollyard.config import Config
from rollyard.learner import TrainerLearner
from rollyard.model.folder import load
from rollyard.objective import options_of
from rollyard.train.trainer import ReferenceTrainer
from rollyard.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    Sample,
    TrainBatch,
    TrainStats,
    VersionSpan,
    WeightVersion,
)
from rollyard.watch.spans import SpanLog

V0 = WeightVersion(0)
TINY = 1e-12  # eps small enough to compare with hand calculations


def stats(**values: Any) -> TrainStats:
    empty = dict(
        step=1, loss=0.0, grad_norm=0.0, learning_rate=0.0, tokens=0, entropy=0.0, clipped_share=0.0, ratio_mean=1.0,
        logprob_gap_mean=0.0, logprob_gap_max=0.0, kept_set_misses=0.0,
    )  # fmt: skip
    return TrainStats(**(empty | values))


def completion(
    tokens: Sequence[int] = (5, 1),
    finish: FinishReason = FinishReason.STOP,
    group: int = 0,
    member: int = 0,
    logprobs: Sequence[float] | None = None,
) -> Completion:
    told = tuple(-1.0 for _ in tokens) if logprobs is None else tuple(logprobs)
    spans = (VersionSpan(V0, V0, len(tokens)),) if tokens else ()
    return Completion(group, member, tuple(tokens), told, spans, finish, "x")


def judged(*members: tuple[Completion, float | None], prompt: Sequence[int] = (3, 4), id_: int = 0) -> Group:
    rollouts = tuple(Rollout(done, Reward(value)) for done, value in members)
    return Group(Prompt(id_, id_, tuple(prompt), f"p{id_}"), rollouts)


def rewarded(*rewards: float | None, id_: int = 0, prompt: Sequence[int] = (3, 4)) -> Group:
    """A group of completions that do not matter."""
    members = ((completion(group=id_, member=k), value) for k, value in enumerate(rewards))
    return judged(*members, id_=id_, prompt=prompt)


class Here:
    """A device that computes in the calling thread."""

    spans = SpanLog()

    async def run(self, call: Any, *args: Any) -> Any:
        return call(*args)


@dataclass
class Seen:
    """Stands in for a trainer: keeps what it is given."""

    version: WeightVersion = V0
    shards: list[TrainBatch] = field(default_factory=list)

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        self.shards += shards
        return stats()

    @property
    def samples(self) -> list[Sample]:
        return [sample for shard in self.shards for sample in shard.samples]


async def rows(groups: Sequence[Group], ranks: int = 1, **sections: Any) -> dict[tuple[int, int], Sample]:
    """The rows that a trainer gets for these groups, by group and member. Sections of the config as dicts."""
    seen = Seen()
    await TrainerLearner(Config.model_validate(sections), seen, ranks).learn(0, groups)  # type: ignore[arg-type]
    found = {(sample.group, sample.member): sample for sample in seen.samples}
    assert len(found) == len(seen.samples), "a rollout is trained on twice"
    return found


async def advantages(groups: Sequence[Group], **config: Any) -> list[list[float | None]]:
    """The advantage of each member as it reaches the trainer, None where none does: by group, in the groups' order."""
    found = await rows(groups, advantage=config)
    each: list[list[float | None]] = []
    for group in groups:
        members = [found.get((group.id, rollout.completion.member)) for rollout in group.rollouts]
        each.append([None if sample is None else _only(sample) for sample in members])
    return each


def _only(sample: Sample) -> float:
    """The same number on every trained token, and 0 elsewhere."""
    trained = {value for value, on in zip(sample.advantages, sample.mask, strict=True) if on}
    assert len(trained) == 1 and not any(v for v, on in zip(sample.advantages, sample.mask, strict=True) if not on)
    return trained.pop()


async def trained(folder: Path, groups: Sequence[Group], version: int = 0, **sections: Any) -> TrainStats:
    """One step of the reference trainer, which has this version, on these groups."""
    config = Config.model_validate(sections)
    policy = ReferenceTrainer(load(folder), Here(), options_of(config), config.rollout.max_tokens, folder, WeightVersion(version))
    return await TrainerLearner(config, policy, 1).learn(version, groups)
