"""Groups that an earlier life of the run finished take their places again (PURE)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from rollyard.events import Admit, BatchTaken, Keep
from rollyard.lives import GroupsRecovered
from rollyard.rollout.batches import Batches
from rollyard.rollout.departures import Departures
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.staleness import fresh_enough
from rollyard.rollout.state import GroupState, Ledger, Output, Phase
from rollyard.types import DropReason, Group, Prompt


class Recovery:
    """Keeps them until their prompts are offered: then each has the rank that it had, and the due version that belongs to it.

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
        self._waiting: dict[int, Group] = {}

    def take(self, event: GroupsRecovered) -> Iterable[Output]:
        """Remember the groups; a batch that was taken before is in training at once."""
        self._waiting = {group.id: group for group in event.groups}
        if not event.batches:
            return
        (batch,) = event.batches
        for found in batch:
            group = self._admit(found.prompt)
            yield Admit(found.prompt)
            yield from self._fill(group, found)
            yield Keep(found, recovered=True)
            self._batches.training.append(group)
        step = self._live.next_batch
        self._live.next_batch += 1
        yield BatchTaken(step, batch)
        yield from self._departures.taken(self._batches.training)

    def join(self, group: GroupState) -> Iterable[Output] | None:
        """What follows from a live group having been finished before; None when it has to be written (anew)."""
        found = self._waiting.pop(group.prompt.id, None)
        if found is None:
            return None
        done = [rollout.completion for rollout in found.rollouts]
        oldest = min((span.version.step for each in done for span in each.spans), default=None)
        if not fresh_enough(oldest, self._live.due(group.prompt.id), self._policy.max_staleness):
            self._ledger.outlived(sum(len(each.token_ids) for each in done))
            return None
        group.oldest = oldest
        return self._settled(group, found)

    def _settled(self, group: GroupState, found: Group) -> Iterable[Output]:
        yield from self._fill(group, found)
        group.unfinished = 1  # the last step of the last member: the whole group is looked at
        yield from self._departures.settle(group)

    def _fill(self, group: GroupState, found: Group) -> Iterable[Output]:
        """Give the members what they wrote, and their verdicts."""
        group.recovered, rollouts = True, {rollout.completion.member: rollout for rollout in found.rollouts}
        for member in group.members:
            if (rollout := rollouts.get(member.index)) is None:
                yield self._departures.leave(member, DropReason.FAILED, "before a restart")
                continue
            done, member.reward = rollout.completion, rollout.reward
            member.completion, member.phase = done, Phase.SCORED
            member.token_ids, member.logprobs, member.spans = list(done.token_ids), list(done.logprobs), list(done.spans)
            self._ledger.recovered(len(done.token_ids))
            value = rollout.reward.value
            if value is None or not math.isfinite(value):
                yield self._departures.leave(member, DropReason.NO_VERDICT, rollout.reward.problem)
        group.unfinished = 0
