"""Members that wait for an engine, those that are due first before all others (PURE)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from sortedcontainers import SortedList

from rollyard.rollout.live import LiveGroups
from rollyard.rollout.state import GroupState, Member, Phase

Urgency = Callable[[GroupState], float]


class Waiting:
    """Keeps the waiting members of each group. Entries may be out of date: groups leave without a word.

    Args:
        urgency: of groups that are due at the same version the one with the largest goes first, and one member of each
            before the second of any; None: in order of admission.
    """

    def __init__(self, live: LiveGroups, urgency: Urgency | None) -> None:
        self._live, self._urgency = live, urgency
        self._members: dict[int, list[int]] = {}  # by group, the last first
        self._groups: SortedList[int] = SortedList()

    def __bool__(self) -> bool:
        return bool(self.due_after(-1))

    def add(self, member: Member) -> None:
        if member.group not in self._members:
            self._members[member.group] = []
            self._groups.add(member.group)
        members = self._members[member.group]
        members.append(member.index)
        members.sort(reverse=True)

    def due_after(self, group_id: int) -> list[int]:
        """The groups with a waiting member that are due first, of those that were admitted after this one."""
        groups, start = self._groups, self._groups.bisect_right(group_id)
        while start < len(groups) and not self._waits(groups[start]):
            del self._members[groups.pop(start)]
        if start == len(groups):
            return []
        return list(groups[start : groups.bisect_left(self._live.due_with(groups[start]))])

    def in_turn(self, groups: list[int]) -> Iterator[tuple[GroupState, Member]]:
        """Their waiting members, in the order in which they are to be asked. Those that were taken leave with `take`."""
        if self._urgency is None:
            for group_id in groups:
                if self._waits(group_id):
                    group = self._live.groups[group_id]
                    for index in reversed(list(self._members[group_id])):
                        yield group, group.members[index]
            return
        heap = [self._place(group_id) for group_id in groups if self._waits(group_id)]
        heapq.heapify(heap)
        while heap:
            group_id = heap[0][-1]
            group = self._live.groups[group_id]
            yield group, group.members[self._members[group_id][-1]]
            if group_id in self._members:
                heapq.heapreplace(heap, self._place(group_id))
            else:
                heapq.heappop(heap)

    def take(self, member: Member) -> None:
        """It waits no more."""
        members = self._members[member.group]
        members.remove(member.index)
        if not members:
            del self._members[member.group]
            self._groups.remove(member.group)

    def _place(self, group_id: int) -> tuple[bool, float, int, int]:
        assert self._urgency is not None
        group = self._live.groups[group_id]
        return group.home is not None, -self._urgency(group), -len(self._members[group_id]), group_id

    def _waits(self, group_id: int) -> bool:
        group = self._live.groups.get(group_id)
        return group is not None and all(group.members[i].phase is Phase.WAITING for i in self._members[group_id])
