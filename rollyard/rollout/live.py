"""The live groups in order of admission, and what their ranks allow (PURE)."""

from __future__ import annotations

from sortedcontainers import SortedList

from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.staleness import due, most_live
from rollyard.rollout.state import GroupState, Member, Phase
from rollyard.types import RequestId


class LiveGroups:
    """Groups admitted and not yet taken for training or dropped.

    Args:
        policy: the rules of this run.
        version: steps trained so far; also the number of batches taken so far.
    """

    def __init__(self, policy: RolloutPolicy, version: int) -> None:
        self._policy = policy
        self.first = self.version = self.next_batch = version
        self.groups: dict[int, GroupState] = {}
        self.ranks: SortedList[int] = SortedList()  # group ids, in order of admission
        self.ready: SortedList[int] = SortedList()  # groups that could be trained

    def __len__(self) -> int:
        return len(self.groups)

    def __contains__(self, group_id: int | None) -> bool:
        return group_id in self.groups

    def add(self, group: GroupState) -> None:
        self.groups[group.prompt.id] = group
        self.ranks.add(group.prompt.id)

    def remove(self, group_id: int) -> None:
        self.groups.pop(group_id, None)
        self.ranks.discard(group_id)
        self.ready.discard(group_id)

    def room(self) -> int:
        """Groups that may be admitted now."""
        policy = self._policy
        most = most_live(self.version, self.next_batch, policy.batches, policy.max_staleness, policy.groups_per_batch)
        if policy.max_live_groups:
            most = min(most, policy.max_live_groups)
        return most - len(self.groups)

    def due(self, group_id: int) -> int:
        """The version that a group is expected to train."""
        return due(self.next_batch, self.ranks.index(group_id), self._policy.groups_per_batch)

    def allowed(self, group_id: int) -> tuple[int, int | None]:
        """The oldest and the newest version that may work for a group; None: however new."""
        oldest = self.due(group_id) - self._policy.max_staleness
        return oldest, max(oldest, self.first) if self._policy.exact else None

    def running(self, request: RequestId) -> Member | None:
        """The member this attempt works for, None when the attempt was given up or its group has left."""
        group = self.groups.get(request.group)
        if group is None:
            return None
        member = group.members[request.member]
        return member if member.phase is Phase.RUNNING and member.attempt == request.attempt else None
