"""A step of three prompts, small enough to work out by hand."""

from collections.abc import Mapping

from rollyard.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    Reward,
    Rollout,
    TrainStats,
    VersionSpan,
    WeightVersion,
)
from rollyard.watch.step import Step
from rollyard.watch.timeline import PhaseSeconds

V0 = WeightVersion(0)
NO_PARTS: Mapping[str, float] = {}


def rollout(group: int, member: int, tokens: int, value: float | None, parts: Mapping[str, float] = NO_PARTS) -> Rollout:
    ids, logprobs = (7,) * tokens, (-1.0,) * tokens
    done = Completion(group, member, ids, logprobs, (VersionSpan(V0, V0, tokens),), FinishReason.STOP, "x")
    return Rollout(done, Reward(value, parts))


def group(id: int, *members: tuple[int, float | None]) -> Group:
    """Members as (tokens, reward)."""
    rollouts = tuple(rollout(id, index, tokens, value) for index, (tokens, value) in enumerate(members))
    return Group(prompt(id), rollouts)


def prompt(id: int) -> Prompt:
    return Prompt(id, id, (1, 2), "x")


TRAIN = TrainStats(
    step=0,
    loss=0.5,
    grad_norm=2.0,
    learning_rate=1e-3,
    tokens=20,
    entropy=1.5,
    clipped_share=0.1,
    ratio_mean=1.0,
    logprob_gap_mean=0.0,
    logprob_gap_max=0.0,
    kept_set_misses=0.0,
)

STEP = Step(
    step=1,
    version=WeightVersion(1),
    groups=(
        Group(prompt(0), (rollout(0, 0, 2, 1.0, {"x": 1.0}), rollout(0, 1, 4, 0.0, {"x": 0.0}))),
        Group(prompt(1), (rollout(1, 0, 6, 0.5), rollout(1, 1, 8, None, {"x": -0.25}))),
        group(2, (1, 0.0), (9, float("nan"))),
    ),
    train=TRAIN,
    phases=PhaseSeconds(wall_s=5.0, generate_s=2.5, train_s=2.0, unaccounted_s=0.5, generating_s=2.5),
    tokens=50,
    dropped={"failed": 2, "context": 1},
)
