"""Which groups are too old to be overtaken by a batch (PURE).

A batch of the groups that are ready first leaves others behind, which are then due later than they were: by one version at most.
One whose oldest token or engine would be older than the staleness limit allows by then stands in the way. To look at all of them
for each group that becomes ready would cost as much as there are. So a group is looked at again when something of it may have
become worse, or when so many batches more were taken that it could be too old.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterator

from rollyard.events import EngineId
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.staleness import due


class Overtaking:
    """Looks at the groups that the next batch would leave behind.

    Args:
        version_of: the version that an engine acknowledged last; None: none yet.
    """

    def __init__(self, policy: RolloutPolicy, live: LiveGroups, version_of: Callable[[EngineId], int | None]) -> None:
        self._policy, self._live, self._version_of = policy, live, version_of
        self._batch = live.next_batch  # that it was asked about last
        self._suspects: list[int] = []  # heap of groups that may be too old for it, all of these are
        self._later: defaultdict[int, list[int]] = defaultdict(list)  # others, by the first batch that they may be too old for
        self._last = -1  # of the groups that were chosen last time
        self._passed = -1  # no group before it is unready

    def unready(self) -> int:
        """The first group that is not ready; there is one."""
        self._turn()
        ranks, ready = self._live.ranks, self._live.ready
        self._passed = next(group_id for group_id in ranks.irange(self._passed) if group_id not in ready)
        return self._passed

    def too_old(self, size: int) -> Iterator[int]:
        """Those that stand in the way of a batch of the first groups that are ready, in order of admission.

        Args:
            size: groups of the batch, of which so many are ready.
        """
        self._turn()
        live, suspects = self._live, self._suspects
        last: int = live.ready[size - 1]
        for group_id in (*live.touched, *live.ready.irange(last, self._last, inclusive=(False, True))):
            heapq.heappush(suspects, group_id)
        live.touched.clear()
        self._last = last
        while suspects:
            group_id = suspects[0]
            if group_id in live:
                chosen = group_id in live.ready and group_id <= last
                spare = 0 if chosen else self._spare(group_id, size)
                if spare is not None and spare < 0:
                    yield group_id
                elif spare is not None:
                    self._later[self._batch + spare + 1].append(group_id)
            while suspects and suspects[0] == group_id:
                heapq.heappop(suspects)

    def _turn(self) -> None:
        """Another batch is the next one: some come near."""
        while self._batch < self._live.next_batch:
            self._batch, self._last, self._passed = self._batch + 1, -1, -1
            for group_id in self._later.pop(self._batch, ()):
                heapq.heappush(self._suspects, group_id)

    def _spare(self, group_id: int, size: int) -> int | None:
        """Versions that this one, left behind by `size` others, is younger than it has to be; None: nothing of it can be old."""
        live, group = self._live, self._live.groups[group_id]
        steps = [] if group.oldest is None else [group.oldest]
        for member in group.members:
            version = self._version_of(member.engine) if member.engine is not None else None
            if version is not None:
                steps.append(version)
        if not steps:
            return None
        rank = live.ranks.bisect_left(group_id) - min(live.ready.bisect_left(group_id), size)
        return min(steps) + self._policy.max_staleness - due(live.next_batch + 1, rank, self._policy.groups_per_batch)
