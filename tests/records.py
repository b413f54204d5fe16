"""What a journal would have of a run and its lives: kept from what the core says, with the rules of recovery and nothing else."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rollyard import events as ev
from rollyard.fitness import Unwrite
from rollyard.lives import GroupsRecovered, Reuse, Wrote
from rollyard.types import Begun, Completion, Group, Partial, Prompt, Reward, Rollout, VersionSpan, WeightVersion

Written = list[tuple[int, float, WeightVersion, WeightVersion]]  # token, logprob, version, oldest key and value


def apart(token_ids: Iterable[int], logprobs: Iterable[float], spans: Iterable[VersionSpan]) -> Written:
    """Each token by itself."""
    versions = [(version, oldest) for version, oldest, tokens in spans for _ in range(tokens)]
    return [(token, logprob, *by) for token, logprob, by in zip(token_ids, logprobs, versions, strict=True)]


def partial(member: int, written: Written) -> Partial:
    spans = tuple(VersionSpan(*by, len(list(run))) for by, run in groupby(each[2:] for each in written))
    return Partial(member, tuple(each[0] for each in written), tuple(each[1] for each in written), spans)


@dataclass
class Story:
    """What one life says of one group."""

    prompt: Prompt
    written: dict[int, Written] = field(default_factory=dict)
    completions: dict[int, Completion] = field(default_factory=dict)
    rewards: dict[int, Reward] = field(default_factory=dict)
    dropped: dict[int, str] = field(default_factory=dict)
    left: str = ""  # why it was dropped

    def judge(self, rollout: Rollout) -> None:
        self.completions[rollout.completion.member] = rollout.completion
        self.rewards[rollout.completion.member] = rollout.reward

    def rollouts(self) -> tuple[Rollout, ...]:
        """Judged, and believed."""
        believed = (k for k in sorted(self.rewards) if self.dropped.get(k) != "distrusted")
        return tuple(Rollout(self.completions[k], self.rewards[k]) for k in believed)

    def begun(self) -> Begun:
        """Members that were dropped alone are tried again."""
        judged = tuple(each for each in self.rollouts() if each.completion.member not in self.dropped)
        ended = tuple(done for k, done in sorted(self.completions.items()) if k not in self.rewards and k not in self.dropped)
        left = self.completions.keys() | self.dropped.keys()
        under_way = (k for k, written in sorted(self.written.items()) if written and k not in left)
        return Begun(self.prompt.id, judged, ended, tuple(partial(k, self.written[k]) for k in under_way))


@dataclass(frozen=True)
class Past:
    """What the next life begins with."""

    version: WeightVersion
    done: dict[int, str]  # prompts that are not asked again: why they were dropped; "" for those in a batch
    recovered: GroupsRecovered
    trained: tuple[tuple[int, ...], ...]  # batches that the version was trained on
    counters: dict[str, Any] | None  # None: no checkpoint
    dropped: dict[str, int]
    members_dropped: dict[str, int]


class Records:
    """Written step by step; some of the last steps are lost with the life that wrote them, none before a checkpoint."""

    def __init__(self, group_size: int) -> None:
        self._size = group_size
        self._steps: list[tuple[int, tuple[Any, ...]]] = []  # life, and what was recorded in one step
        self.life = 0
        self.checkpoints: list[tuple[WeightVersion, dict[str, Any], int]] = []  # and how many steps are on the disk

    def step(self, message: object, said: Iterable[object]) -> None:
        kinds = (ev.Admit, ev.Score, ev.Scored, ev.Keep, ev.Drop, ev.Train, Wrote, Unwrite, Reuse)
        entries = tuple(each for each in (message, *said) if isinstance(each, kinds))
        if entries:
            self._steps.append((self.life, entries))

    def checkpoint(self, version: WeightVersion, counters: dict[str, Any]) -> None:
        self.checkpoints.append((version, counters, len(self._steps)))

    def kill(self, dice: random.Random) -> None:
        """A life ends at once."""
        synced = self.checkpoints[-1][2] if self.checkpoints else 0
        kept = len(self._steps) - dice.choice((0, 0, 0, dice.randint(0, 10), dice.randint(0, len(self._steps))))
        del self._steps[max(kept, synced) :]
        self.life += 1

    def batches(self) -> dict[int, tuple[int, ...]]:
        """By step, of the newest life that has it."""
        trains = (entry for _, entries in self._steps for entry in entries if isinstance(entry, ev.Train))
        return {train.step: tuple(group.id for group in train.groups) for train in trains}

    def stories(self) -> dict[int, Story]:
        """Of each group, as the newest life that admitted it tells it."""
        found: dict[int, Story] = {}
        for _, entries in self._steps:
            for entry in entries:
                self._tell(found, entry)
        return found

    def _tell(self, found: dict[int, Story], entry: Any) -> None:
        match entry:
            case ev.Admit(prompt):
                found[prompt.id] = Story(prompt)
            case Reuse(begun):
                story = found[begun.group]
                for rollout in begun.rollouts:
                    story.judge(rollout)
                for part in begun.partials:
                    story.written[part.member] = apart(part.token_ids, part.logprobs, part.spans)
            case ev.Keep(group, recovered=True):
                for rollout in group.rollouts:
                    found[group.id].judge(rollout)
            case Wrote(segment):
                count = len(segment.token_ids)
                span = VersionSpan(segment.version, segment.oldest_kv, count)
                written = found[segment.request.group].written.setdefault(segment.request.member, [])
                written += apart(segment.token_ids, segment.logprobs, (span,))
            case Unwrite(group, member, tokens):
                del found[group].written[member][tokens:]
            case ev.Score(prompt, completion):
                assert completion.member not in found[prompt.id].completions, "an answer is recorded once in a life"
                found[prompt.id].completions[completion.member] = completion
            case ev.Scored(group, member, reward) if group in found and member in found[group].completions:
                found[group].rewards[member] = reward
            case ev.Drop(reason="stopped"):
                pass  # asked again
            case ev.Drop(group, None, reason):
                found[group].left = str(reason)
            case ev.Drop(group, int() as member, reason):
                found[group].dropped[member] = str(reason)

    def past(self) -> Past:
        version, counters, _ = self.checkpoints[-1] if self.checkpoints else (WeightVersion(0), None, 0)
        batches, stories, after = self.batches(), self.stories(), version.step
        stored = []
        while after in batches:
            stored.append(tuple(Group(stories[id_].prompt, stories[id_].rollouts()) for id_ in batches[after]))
            after += 1
        assert max(batches, default=-1) < after, "what is recorded in order has no gap"
        done = {id_: "" for step in range(after) for id_ in batches[step]}
        done |= {id_: story.left for id_, story in stories.items() if story.left}
        live = [story for id_, story in sorted(stories.items()) if id_ not in done]
        complete, begun = [], []
        for story in live:
            if len(story.rewards.keys() | story.dropped.keys()) == self._size:
                complete.append(Group(story.prompt, story.rollouts()))
            else:
                begun.append(story.begun())
        recovered = GroupsRecovered(tuple(complete), tuple(stored), tuple(begun), self._filtered(after - 1))
        trained = tuple(batches[step] for step in range(version.step))
        gone = {id_ for batch in trained for id_ in batch} | {id_ for id_, why in done.items() if why}
        members = Counter(why for id_ in gone for why in stories[id_].dropped.values())
        return Past(version, done, recovered, trained, counters, dict(Counter(filter(None, done.values()))), dict(members))

    def _filtered(self, last: int) -> int:
        """Groups filtered since a batch was taken for the first time."""
        found = 0
        entries = [entry for _, entries in self._steps for entry in entries]
        taken = (at for at, entry in enumerate(entries) if isinstance(entry, ev.Train) and entry.step == last)
        for entry in entries[next(taken, -1) + 1 :]:
            found += isinstance(entry, ev.Drop) and entry.member is None and entry.reason == "filtered"
        return found
