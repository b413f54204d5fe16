"""The live groups in order of admission, and what their ranks allow (PURE)."""

from __future__ import annotations

import math
from bisect import bisect_right

from sortedcontainers import SortedList, SortedSet

from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.staleness import most_live
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
        self.ready: SortedSet[int] = SortedSet()  # groups that could be trained
        self.touched: set[int] = set()  # groups that may have older tokens or engines than when a batch was last looked for
        self._bound = (-1, -1, 0)  # a version, the next batch, and how many groups may then be live
        self._marks: list[int] = []  # the first of each batch's worth of ranks
        self._marked = True  # they are right
        self._asked = 0  # how often, since they are not

    def __len__(self) -> int:
        return len(self.groups)

    def __contains__(self, group_id: int | None) -> bool:
        return group_id in self.groups

    def add(self, group: GroupState) -> None:
        """It is the last in rank: prompts come in the order of their ids."""
        group_id = group.prompt.id
        assert not self.ranks or group_id > self.ranks[-1], f"prompt {group_id} came after prompt {self.ranks[-1]}"
        if self._marked and len(self.ranks) % self._policy.groups_per_batch == 0:
            self._marks.append(group_id)
        self.groups[group_id] = group
        self.ranks.add(group_id)
        self.touched.add(group_id)

    def remove(self, group_id: int) -> None:
        if self.groups.pop(group_id, None) is None:
            return
        self.ranks.remove(group_id)
        self.ready.discard(group_id)
        self.touched.discard(group_id)
        if self._marked and group_id <= self._marks[-1]:
            self._marked, self._asked = False, 0

    def wrote(self, group: GroupState, step: int) -> None:
        """It has tokens of this version."""
        if group.oldest is None or step < group.oldest:
            group.oldest = step
            self.touched.add(group.prompt.id)

    def room(self) -> int:
        """Groups that may be admitted now."""
        version, batch, most = self._bound
        if version != self.version or batch != self.next_batch:
            most = self._most()
            self._bound = self.version, self.next_batch, most
        return most - len(self.groups)

    def _most(self) -> int:
        """Groups that may be live at once."""
        policy = self._policy
        size, limit = policy.groups_per_batch, policy.max_staleness
        most = most_live(self.version, self.next_batch, policy.batches, limit, size)
        if policy.oversample:  # the last batches have a surplus too
            bound = most_live(self.version, self.next_batch, self.version + limit + 1, limit, size)
            most = min(bound, self.wanted + policy.oversample, size + policy.oversample) if self.wanted > 0 else 0
        if policy.max_live_groups:
            most = min(most, policy.max_live_groups)
        return most

    @property
    def wanted(self) -> int:
        """Groups that batches will still take."""
        return (self._policy.batches - self.next_batch) * self._policy.groups_per_batch

    def before(self, rank: int) -> int | float:
        """An id above those of the groups of lower rank, and of no others."""
        return self.ranks[rank] if rank < len(self.ranks) else math.inf

    def due_with(self, group_id: int) -> int | float:
        """An id above those of the groups that are due when this one is, or before."""
        batches = self.batches_before(group_id) + 1
        if not self._marked:
            return self.before(batches * self._policy.groups_per_batch)
        return self._marks[batches] if batches < len(self._marks) else math.inf

    def due(self, group_id: int) -> int:
        """The version that a group is expected to train."""
        return self.next_batch + self.batches_before(group_id)

    def batches_before(self, group_id: int) -> int:
        """Of the groups of lower rank: how many batches they make."""
        if not self._marked:
            size = self._policy.groups_per_batch
            self._asked += 1
            if self._asked * size <= len(self.ranks):  # to find the marks costs as much as so many answers
                return int(self.ranks.bisect_left(group_id)) // size
            self._marks, self._marked = [self.ranks[rank] for rank in range(0, len(self.ranks), size)], True
        return bisect_right(self._marks, group_id) - 1

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
