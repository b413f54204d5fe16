"""How members and groups leave without being trained (PURE): each exactly once, with a reason."""

from __future__ import annotations

from collections.abc import Iterable

from rollyard.events import Abort, Drop, Keep, RolloutsFailed
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.state import Counts, GroupState, Ledger, Member, Output, Phase
from rollyard.types import DropReason, RequestId


class Departures:
    """Drops members and groups, and settles groups whose last member is final.

    Dynamic sampling: a group whose verdicts are all equal is dropped, which makes room for another prompt. For each batch
    that happens `refills` times at most, counted from when the batch before was taken; then such groups are trained as they
    are, so that a batch comes to an end however easy or hard the prompts have become. Source: DAPO,
    https://arxiv.org/abs/2503.14476, section 3.2. A group that an earlier life completed was looked at then.
    """

    def __init__(self, policy: RolloutPolicy, live: LiveGroups, counts: Counts, ledger: Ledger) -> None:
        self._policy = policy
        self._live = live
        self._counts = counts
        self._ledger = ledger
        self._in_row = 0
        self._filtered = 0  # for the batch that is taken next

    def drop_member(self, group: GroupState, member: Member, reason: DropReason, cause: str) -> Iterable[Output]:
        group.last_cause = cause
        yield self.leave(member, reason, cause)
        yield from self.settle(group)

    def settle(self, group: GroupState) -> Iterable[Output]:
        """One more member is final. When all are, the group is ready or leaves."""
        group.unfinished -= 1
        return () if group.unfinished else self._settled(group)

    def _settled(self, group: GroupState) -> Iterable[Output]:
        if group.scored >= self._policy.min_scored:
            self._in_row = 0
            if self._filters(group):
                self._filtered += 1
                yield from self.drop_group(group, DropReason.FILTERED, "all verdicts are equal")
                return
            self._live.ready.add(group.prompt.id)
            yield Keep(group.record(), group.recovered)
            return
        cause = f"{group.scored} of {len(group.members)} members have a verdict, {self._policy.min_scored} are needed"
        cause += f"; {group.last_cause}" if group.last_cause else ""
        yield from self.drop_group(group, DropReason.DISTRUSTED if group.distrusted else DropReason.FAILED, cause)

    def _filters(self, group: GroupState) -> bool:
        if self._policy.filter == "none" or group.recovered or not group.flat:
            return False
        if self._filtered < self._policy.refills:
            return True
        self._counts.unfiltered += 1
        return False

    def admitted(self) -> None:
        """One more prompt is live, in the place of one that was filtered where that has not been taken."""
        if self._counts.dropped.get(DropReason.FILTERED, 0) > self._counts.refills:
            self._counts.refills += 1

    def go_on(self, filtered: int = 0) -> None:
        """Another batch is the next to be taken; so many groups were filtered for it already."""
        self._filtered = filtered

    def masked(self, groups: Iterable[GroupState]) -> Iterable[Output]:
        """Members of a batch that are not to be trained on leave; the groups' records have them."""
        for group in groups if self._policy.mask_truncated else ():
            for member in group.members:
                if member.phase is Phase.SCORED and member.completion and member.completion.finish.truncated:
                    yield self.leave(member, DropReason.FILTERED, "it was cut by a limit")

    def drop_group(self, group: GroupState, reason: DropReason, cause: str) -> Iterable[Output]:
        held = [(m.engine, RequestId(m.group, m.index, m.attempt)) for m in group.members if m.engine is not None]
        for member in group.members:
            if member.phase is not Phase.DROPPED:
                yield self.leave(member, reason, cause)
        for engine, request in held:
            self._ledger.cut(request, reason)
            yield Abort(engine, (request,))
        self._live.remove(group.prompt.id)
        dropped = self._counts.dropped
        dropped[reason] = dropped.get(reason, 0) + 1
        yield Drop(group.prompt.id, None, reason, cause)
        if reason in (DropReason.STOPPED, DropReason.OVERSAMPLED, DropReason.FILTERED, DropReason.DISTRUSTED):
            return
        self._in_row += 1
        if self._in_row == self._policy.give_up_after:
            yield RolloutsFailed(f"{self._in_row} prompts in a row were dropped, the last one: {cause}")

    def leave(self, member: Member, reason: DropReason, cause: str) -> Drop:
        """The member is final; whether its group is, `settle` looks."""
        self._ledger.dropped(member, reason)
        member.phase, member.engine = Phase.DROPPED, None
        dropped = self._counts.members_dropped
        dropped[reason] = dropped.get(reason, 0) + 1
        return Drop(member.group, member.index, reason, cause)
