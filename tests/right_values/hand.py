"""The real core, driven by hand: engines, judge and trainer say what a test wants them to say, in the order it wants."""

from __future__ import annotations

from collections.abc import Sequence

from rollyard import events as ev
from rollyard.lives import GroupsRecovered
from rollyard.rollout.core import RolloutCore
from rollyard.rollout.policy import RolloutPolicy
from rollyard.types import Completion, FinishReason, Group, Prompt, Request, RequestId, Reward, Sampling, Segment, WeightVersion


def prompts(*ids: int, tokens: Sequence[int] = (2, 3)) -> tuple[Prompt, ...]:
    return tuple(Prompt(id_, id_, tuple(tokens), f"p{id_}") for id_ in ids)


class Hand:
    """A core with generation open and one engine that has its version.

    Args:
        version: steps that were trained before, as after a resume.
        changes: rules; by default groups of 2, batches of 1, nothing tried again.
    """

    def __init__(self, version: int = 0, *, recovered: Sequence[Group] = (), slots: int = 64, **changes: object) -> None:
        rules: dict[str, object] = dict(
            group_size=2, groups_per_batch=1, batches=1000, sampling=Sampling(8), window=100, min_scored=1, retries=0
        )
        self.core = RolloutCore(RolloutPolicy(**(rules | changes)), version)  # type: ignore[arg-type]
        self.version = version
        self.said: list[ev.Instruction | ev.Signal] = []
        self.requests: dict[tuple[int, int], Request] = {}  # the newest of each member
        if recovered:
            self.send(GroupsRecovered(tuple(recovered)))
        self.first = self.room(self.send(ev.GenerationOpened()))
        self.send(ev.EngineUp("e", slots, WeightVersion(version)))

    def send(self, message: ev.Event | ev.Signal) -> list[ev.Instruction | ev.Signal]:
        said = self.core.step(message, 0.0)
        self.said += said
        for each in said:
            if isinstance(each, ev.Generate):
                self.requests[each.request.id[:2]] = each.request
        return said

    @staticmethod
    def room(said: Sequence[ev.Instruction | ev.Signal]) -> int:
        """How many prompts were asked for."""
        return sum(each.count for each in said if isinstance(each, ev.FetchPrompts))

    def offer(self, *ids: int, tokens: Sequence[int] = (2, 3), exhausted: bool = False) -> int:
        """Prompts come. How many more were asked for then."""
        return self.room(self.send(ev.PromptsOffered(prompts(*ids, tokens=tokens), exhausted)))

    def write(
        self,
        group: int,
        member: int,
        tokens: Sequence[int] = (5, 1),
        finish: FinishReason | None = FinishReason.STOP,
        version: int | None = None,
        text: str = "",
    ) -> list[ev.Instruction | ev.Signal]:
        """An engine wrote this for the newest attempt."""
        by = WeightVersion(self.version if version is None else version)
        attempt = self.requests[group, member].id
        logprobs = tuple(-1.0 for _ in tokens)
        return self.send(ev.SegmentArrived("e", Segment(attempt, tuple(tokens), logprobs, by, by, finish), text))

    def fail(self, group: int, member: int) -> list[ev.Instruction | ev.Signal]:
        return self.send(ev.RequestFailed("e", self.requests[group, member].id, "broken", retryable=False))

    def judge(self, group: int, member: int, value: float | None) -> None:
        self.send(ev.Scored(group, member, Reward(value)))

    def take(self) -> ev.BatchTaken | None:
        """Ask for a batch; it, if it may be taken."""
        said = self.send(ev.BatchWanted())
        return next((each for each in said if isinstance(each, ev.BatchTaken)), None)

    def train(self) -> None:
        """The batch that was taken is trained."""
        self.version += 1
        self.send(ev.BatchTrained(WeightVersion(self.version)))

    def load(self) -> list[ev.Instruction | ev.Signal]:
        """The engine has the newest version."""
        return self.send(ev.EngineLoaded("e", WeightVersion(self.version)))

    def completions(self) -> list[Completion]:
        return [each.completion for each in self.said if isinstance(each, ev.Score)]

    def dropped(self) -> list[tuple[int, int | None, str]]:
        return [(each.group, each.member, str(each.reason)) for each in self.said if isinstance(each, ev.Drop)]

    def request(self, group: int, member: int = 0) -> RequestId:
        return self.requests[group, member].id
