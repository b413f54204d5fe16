"""Members that wait for an engine, those that are due first before all others (PURE)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from sortedcontainers import SortedList

from rollyard.rollout.live import LiveGroups
from rollyard.rollout.state import GroupState, Member

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
        return self.first_after(-1) is not None

    def add(self, member: Member) -> None:
        members = self._members.get(member.group)
        if members is None:
            members = self._members[member.group] = []
            self._groups.add(member.group)
        members.append(member.index)
        members.sort(reverse=True)

    def first_after(self, group_id: int | float) -> int | None:
        """The first group with a waiting member, of those that were admitted after this one."""
        groups = self._groups
        start = groups.bisect_right(group_id) if groups else 0
        while start < len(groups):
            found: int = groups[start]
            if found in self._live:
                return found
            del self._members[groups.pop(start)]
        return None

    def in_turn(self, first: int) -> Iterator[tuple[GroupState, Member]]:
        """The waiting members of the groups that are due when this one is, in the order in which they are to be asked.

        Those that were taken leave with `take`.
        """
        end = self._live.due_with(first)
        if self._urgency is None:
            group_id: int | None = first
            while group_id is not None and group_id < end:
                group = self._live.groups[group_id]
                for index in reversed(list(self._members[group_id])):
                    yield group, group.members[index]
                group_id = self.first_after(group_id)
            return
        due = self._groups.irange(first, end, inclusive=(True, False))
        heap = [self._place(waiting) for waiting in due if waiting in self._live]
        heapq.heapify(heap)
        while heap:
            urgent = heap[0][-1]
            group = self._live.groups[urgent]
            yield group, group.members[self._members[urgent][-1]]
            if urgent in self._members:
                heapq.heapreplace(heap, self._place(urgent))
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
