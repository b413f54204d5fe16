"""A small run, as the conductor would see it: two prompts, two members each."""

from dataclasses import replace

from rollyard.events import (
    Admit,
    BatchTrained,
    Drop,
    EngineDown,
    EngineLoaded,
    EngineUp,
    Event,
    Finish,
    Instruction,
    Published,
    RequestFailed,
    Score,
    Scored,
    Train,
)
from rollyard.journal.journal import RunRecord
from rollyard.types import (
    Completion,
    DropReason,
    FinishReason,
    Group,
    Prompt,
    RequestId,
    Reward,
    Rollout,
    Turn,
    VersionSpan,
    WeightVersion,
)

RUN = RunRecord(name="sort", rollyard="0.1.0", seed=7, group_size=2, config='{"run": {"seed": 7}}')
V0, V1 = WeightVersion(0), WeightVersion(1)
CAB = Prompt(id=0, row=5, token_ids=(3, 1, 2), text="cab", columns={"answer": "abc", "weights": [1, 2]})
ZY = Prompt(id=1, row=2, token_ids=(26, 25), text="zy", columns={"answer": "yz"})


def completion(group: int, member: int, text: str = "abc") -> Completion:
    """Two tokens of version 0 and one of version 1. The logprobs are exact in float32."""
    spans = (VersionSpan(V0, V0, 2), VersionSpan(V1, V0, 1))
    return Completion(group, member, (1, 2, 70000), (-0.5, -0.25, -2.0), spans, FinishReason.STOP, text)


def episode(group: int, member: int, text: str) -> Completion:
    """The same tokens in three turns: after a tool's answer, after something else, and one that had no room."""
    turns = (
        Turn((3, 1, 2), 1, FinishReason.STOP),
        Turn((3, 1, 2, 1, 9, 9), 2, FinishReason.LENGTH),
        Turn((3, 1, 7, 8), 0, FinishReason.CONTEXT),
    )
    return replace(completion(group, member, text), turns=turns, finish=FinishReason.CONTEXT)


GOOD = Rollout(completion(0, 0), Reward(1.0, {"exact_match": 1.0}))
POOR = Rollout(completion(0, 1, "acb"), Reward(0.0, {"exact_match": 0.0}))
MUTE = Rollout(episode(1, 0, "?"), Reward(None, problem="ValueError: no number"))

ENTRIES: tuple[Event | Instruction, ...] = (
    EngineUp("embedded-0", slots=4, version=None),
    Published(V0),
    EngineLoaded("embedded-0", V0),
    Admit(CAB),
    Admit(ZY),
    RequestFailed("embedded-0", RequestId(1, 1, 0), "out of pages", retryable=True),
    Score(CAB, GOOD.completion),
    Scored(0, 0, GOOD.reward),
    Score(ZY, MUTE.completion),
    Scored(1, 0, MUTE.reward),
    Drop(1, 0, DropReason.NO_VERDICT, "ValueError: no number"),
    Score(CAB, POOR.completion),
    Scored(0, 1, POOR.reward),
    Drop(1, 1, DropReason.FAILED, "0 of 2 members have a verdict, 1 are needed"),
    Drop(1, None, DropReason.FAILED, "0 of 2 members have a verdict, 1 are needed"),
    Train(0, (Group(CAB, (GOOD, POOR)),)),
    BatchTrained(V1),
    Published(V1),
    EngineDown("embedded-0", "killed"),
    Finish("no engine is left: killed", failed=True),
)
