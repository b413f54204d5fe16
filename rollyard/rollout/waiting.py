"""Members that wait for an engine, those that are due first before all others (PURE)."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator

from sortedcontainers import SortedList, SortedSet

from rollyard.rollout.live import LiveGroups
from rollyard.rollout.state import GroupState, Member

Urgency = Callable[[GroupState], float]
Place = tuple[bool, float, int, int]  # has an engine, less its urgency, less its members that wait, and which group it is

OUTDATED = 4  # entries of a heap for each group that waits, at most


class Waiting:
    """Keeps the waiting members of each group. Entries may be out of date: groups leave without a word.

    Args:
        urgency: of groups that are due at the same version the one with the largest goes first, and one member of each
            before the second of any; None: in order of admission.
    """

    def __init__(self, live: LiveGroups, urgency: Urgency | None) -> None:
        self._live = live
        self._members: dict[int, list[int]] = {}  # by group, the last first
        self._read: dict[int, int] = {}  # tokens of a group's waiting members
        self.tokens = 0  # of all
        self._groups: SortedList[int] = SortedList()
        self._urgent = None if urgency is None else Urgent(live, urgency, self._members, self._groups)

    def __bool__(self) -> bool:
        return self.first() is not None

    def __len__(self) -> int:
        """Members that wait. Looks at every group that has one."""
        return sum(len(members) for group, members in self._members.items() if group in self._live)

    def add(self, member: Member) -> None:
        members = self._members.get(member.group)
        if members is None:
            self._members[member.group] = [member.index]
            self._groups.add(member.group)
        else:
            members.append(member.index)
            members.sort(reverse=True)
        member.queued = self._live.groups[member.group].read(member)
        self._read[member.group] = self._read.get(member.group, 0) + member.queued
        self.tokens += member.queued
        if self._urgent is not None:
            self._urgent.unsure(member.group)

    def unsure(self, group_id: int) -> None:
        """What is expected of a group has changed."""
        if self._urgent is not None and group_id in self._members:
            self._urgent.unsure(group_id)

    def first(self) -> int | None:
        """The first group with a waiting member."""
        groups = self._groups
        while groups:
            found: int = groups[0]
            if found in self._live:
                return found
            self._gone(found)
        return None

    def first_after(self, group_id: int | float) -> int | None:
        """The first group with a waiting member, of those that were admitted after this one."""
        groups = self._groups
        start = groups.bisect_right(group_id) if groups else 0
        while start < len(groups):
            found: int = groups[start]
            if found in self._live:
                return found
            self._gone(found)
        return None

    def in_turn(self, first: int, end: int | float) -> Iterator[tuple[GroupState, Member]]:
        """The waiting members of the groups from `first` to `end`, in the order in which they are to be asked.

        Those that were taken leave with `take`.

        Args:
            end: an id above those of the groups that are due when the first one is.
        """
        if self._urgent is not None:
            for group_id in self._urgent.in_turn(first, end):
                group = self._live.groups[group_id]
                yield group, group.members[self._members[group_id][-1]]
            return
        at: int | None = first
        while at is not None and at < end:
            group, members = self._live.groups[at], self._members[at]
            while members:  # each of which is taken, or nobody asks for the next one
                yield group, group.members[members[-1]]
            at = self.first_after(at)

    def take(self, member: Member) -> None:
        """It waits no more."""
        members = self._members[member.group]
        members.remove(member.index)
        self._read[member.group] -= member.queued
        self.tokens -= member.queued
        if not members:
            self._gone(member.group)
        elif self._urgent is not None:
            self._urgent.unsure(member.group)

    def _gone(self, group_id: int) -> None:
        """None of its members waits."""
        del self._members[group_id]
        self.tokens -= self._read.pop(group_id)
        self._groups.remove(group_id)
        if self._urgent is not None:
            self._urgent.gone(group_id)


class Urgent:
    """The groups that wait, the most urgent first of those due at the same version: a heap for each batch's worth of ranks.

    A group comes nearer to its batch and never goes back. So each heap is told of those that came near since it was asked last.

    Args:
        members: that wait, by group.
        groups: that wait.
    """

    def __init__(self, live: LiveGroups, urgency: Urgency, members: dict[int, list[int]], groups: SortedList) -> None:
        self._live, self._urgency, self._members, self._groups = live, urgency, members, groups
        self._places: dict[int, Place] = {}  # of groups whose place is known
        self._unsure: SortedSet[int] = SortedSet()  # all others
        self._heaps: defaultdict[int, list[Place]] = defaultdict(list)  # by how many batches are due before; outdated ones too
        self._seen: dict[int, int | float] = {}  # an id above those of the groups that a heap was told of

    def unsure(self, group_id: int) -> None:
        """Its place is to be found again."""
        self._places.pop(group_id, None)
        self._unsure.add(group_id)

    def gone(self, group_id: int) -> None:
        """It waits no more."""
        self._places.pop(group_id, None)
        self._unsure.discard(group_id)

    def in_turn(self, first: int, end: int | float) -> Iterator[int]:
        """The groups from `first` to `end`; one that goes on waiting comes again, behind those that are more urgent by then."""
        heap = self._heap(first, end)
        while True:
            self._place(heap, first, end)
            while heap and not self._right(heap[0], first):
                heapq.heappop(heap)
            if not heap:
                return
            yield heap[0][-1]

    def _right(self, place: Place, first: int) -> bool:
        """Is a place that a heap has that of a group which is due when the first one is?"""
        group_id = place[-1]
        return group_id >= first and self._places.get(group_id) == place and group_id in self._live

    def _heap(self, first: int, end: int | float) -> list[Place]:
        """Of the groups that are due when the first one is."""
        batches = self._live.batches_before(first)
        heap, seen = self._heaps[batches], self._seen.get(batches, -1)
        if len(heap) > OUTDATED * (len(self._groups) + 1):
            heap.clear()
            seen = -1
        for group_id in self._groups.irange(max(seen, first), end, inclusive=(True, False)):
            if (place := self._places.get(group_id)) is not None:
                heapq.heappush(heap, place)
        self._seen[batches] = max(seen, min(end, self._groups[-1] + 1))
        return heap

    def _place(self, heap: list[Place], first: int, end: int | float) -> None:
        """Find the places that are not known."""
        for group_id in list(self._unsure.irange(first, end, inclusive=(True, False))):
            self._unsure.discard(group_id)
            if (group := self._live.groups.get(group_id)) is not None:
                place = group.home is not None, -self._urgency(group), -len(self._members[group_id]), group_id
                self._places[group_id] = place
                heapq.heappush(heap, place)
