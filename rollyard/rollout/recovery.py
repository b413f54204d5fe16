"""What an earlier life of the run left takes its places again (PURE): batches, complete groups, members on their way.

What is too old for the place that it has now is written anew, and so is what an environment had begun: an episode cannot be
gone on with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rollyard.events import Admit, Keep, Score
from rollyard.lives import GroupsRecovered, Reuse
from rollyard.rollout.batches import Batches
from rollyard.rollout.departures import Departures
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.state import Counts, GroupState, Ledger, Member, Output, Phase, TokenCounts
from rollyard.types import Begun, Completion, DropReason, Group, Partial, Prompt, Reward


class Recovery:
    """Keeps groups until their prompts are offered: then each has the rank that it had, and the due version that belongs to it.

    Args:
        admit: makes a prompt's group, and counts it.
    """

    def __init__(
        self,
        policy: RolloutPolicy,
        live: LiveGroups,
        departures: Departures,
        batches: Batches,
        ledger: Ledger,
        admit: Callable[[Prompt], GroupState],
    ) -> None:
        self._policy, self._live, self._departures = policy, live, departures
        self._batches, self._ledger, self._admit = batches, ledger, admit
        self._complete: dict[int, Group] = {}
        self._begun: dict[int, Begun] = {}

    def take(self, event: GroupsRecovered) -> Iterable[Output]:
        """Remember the groups; batches that were taken before count as taken, and the first is in training at once."""
        self._complete = {group.id: group for group in event.groups}
        self._begun = {begun.group: begun for begun in event.begun}
        self._departures.go_on(event.filtered)
        for batch in event.batches:
            groups = []
            for found in batch:
                groups.append(self._admit(found.prompt))
                yield Admit(found.prompt)
                yield from self._fill(groups[-1], found)
                yield Keep(found, recovered=True)
            self._batches.store(batch, groups)
        yield from self._batches.take_stored()

    def join(self, group: GroupState) -> Iterable[Output]:
        """A prompt is live: what it was given before, it has again."""
        id_ = group.prompt.id
        complete, begun = self._complete.pop(id_, None), self._begun.pop(id_, None)
        if complete is not None:
            done = [rollout.completion for rollout in complete.rollouts]
            if all(self._fresh(group, each) for each in done):
                group.oldest = _oldest(done)
                yield from self._fill(group, complete)
                yield from self._settled(group)
                return
            begun = Begun(id_, complete.rollouts)
        if begun is not None:
            yield from self._go_on(group, begun)

    def _fill(self, group: GroupState, found: Group) -> Iterable[Output]:
        """It was complete: give the members what they wrote, and their verdicts."""
        group.recovered, rollouts = True, {rollout.completion.member: rollout for rollout in found.rollouts}
        group.unfinished = 0
        for member in group.members:
            if (rollout := rollouts.get(member.index)) is None:
                yield self._departures.leave(member, DropReason.FAILED, "before a restart")
                continue
            self._give(member, rollout.completion)
            member.completion, member.reward, member.phase = rollout.completion, rollout.reward, Phase.SCORED
            if not _judged(rollout.reward):
                yield self._departures.leave(member, DropReason.NO_VERDICT, rollout.reward.problem)

    def _go_on(self, group: GroupState, begun: Begun) -> Iterable[Output]:
        """It was not: what is neither used nor begun is written as usual. A member without a verdict is tried again."""
        used = self._usable(group, begun)
        written: list[Completion | Partial] = [*(rollout.completion for rollout in used.rollouts), *used.completions]
        written += used.partials
        if not written:
            return
        yield Reuse(used)
        group.oldest = _oldest(written)
        for each in written:
            self._give(group.members[each.member], each)
        for rollout in used.rollouts:
            member = group.members[rollout.completion.member]
            member.completion, member.reward, member.phase = rollout.completion, rollout.reward, Phase.SCORED
        for done in used.completions:
            member = group.members[done.member]
            member.completion, member.phase = done, Phase.SCORING
            yield Score(group.prompt, done)
        group.unfinished -= len(used.rollouts)
        if not group.unfinished:
            yield from self._settled(group)

    def _usable(self, group: GroupState, begun: Begun) -> Begun:
        """An episode that was not judged is played anew: whether its environment had a verdict, nobody knows any more."""
        single, room = not self._policy.turns, group.max_tokens
        return Begun(
            begun.group,
            tuple(each for each in begun.rollouts if self._uses(group, each.completion, _judged(each.reward))),
            tuple(done for done in begun.completions if self._uses(group, done, single)),
            tuple(part for part in begun.partials if self._uses(group, part, single and 0 < len(part.token_ids) < room)),
        )

    def _uses(self, group: GroupState, written: Completion | Partial, possible: bool) -> bool:
        """Is it used? Tokens that are not have left."""
        fresh = self._fresh(group, written)
        if not (fresh and possible):
            self._ledger.lost(len(written.token_ids), DropReason.FAILED if fresh else DropReason.STALE)
        return fresh and possible

    def _fresh(self, group: GroupState, written: Completion | Partial) -> bool:
        """Is it young enough for the version that its group is due at?"""
        allowed = self._live.due(group.prompt.id) - self._policy.max_staleness
        return all(span.version.step >= allowed for span in written.spans)

    def _give(self, member: Member, written: Completion | Partial) -> None:
        member.give(written)
        self._ledger.recovered(len(written.token_ids))

    def _settled(self, group: GroupState) -> Iterable[Output]:
        group.unfinished = 1  # the last step of the last member: the whole group is looked at
        return self._departures.settle(group)


def _judged(reward: Reward) -> bool:
    return reward.value is not None and math.isfinite(reward.value)


def _oldest(written: Sequence[Completion | Partial]) -> int | None:
    """Version step of the oldest token; None: there are none."""
    return min((span.version.step for each in written for span in each.spans), default=None)


def counts_before(
    counters: Mapping[str, Any], dropped: Mapping[str, int] | None = None, members_dropped: Mapping[str, int] | None = None
) -> Counts:
    """What a new life counts on from: whatever has left for good. What was live is admitted again, and counted then.

    Tokens that came after the checkpoint are counted where they are used again, or are too old for that; others are not.

    Args:
        counters: `Counts` as they were at the checkpoint.
        dropped: prompts that were dropped for good, by reason, also since the checkpoint; None: none since.
        members_dropped: members that were, of all prompts that have left for good; None: as the checkpoint says.
    """
    tokens = counters["tokens"]
    drops, member_drops, token_drops = (
        {reason: count for reason, count in found.items() if reason != DropReason.STOPPED}  # they are asked again
        for found in (
            counters["dropped"] if dropped is None else dropped,
            counters["members_dropped"] if members_dropped is None else members_dropped,
            tokens["dropped"],
        )
    )
    return Counts(
        admitted=counters["trained"] + sum(drops.values()),
        trained=counters["trained"],
        dropped=drops,
        members_admitted=counters["members_trained"] + sum(member_drops.values()),
        members_trained=counters["members_trained"],
        members_dropped=member_drops,
        retries=counters["retries"],
        refills=counters["refills"],
        unfiltered=counters["unfiltered"],
        tokens=TokenCounts(tokens["trained"] + sum(token_drops.values()), tokens["trained"], token_drops),
    )
