"""When a batch may be taken, and which groups are in it (PURE)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from rollyard.events import BatchTaken, BatchTrained, EngineId, RolloutsFinished
from rollyard.rollout.departures import Departures
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.overtaking import Overtaking
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.state import Counts, GroupState, Ledger, Output
from rollyard.types import DropReason, Group


class Batches:
    """Takes batches from the live groups, so that every group left behind keeps the staleness limit.

    Args:
        version_of: the version that an engine acknowledged last; None: none yet.
    """

    def __init__(
        self,
        policy: RolloutPolicy,
        live: LiveGroups,
        departures: Departures,
        counts: Counts,
        ledger: Ledger,
        version_of: Callable[[EngineId], int | None],
    ) -> None:
        self._policy = policy
        self._live = live
        self._departures = departures
        self._counts = counts
        self._ledger = ledger
        self._overtaking = Overtaking(policy, live, version_of)
        self.training: list[GroupState] = []
        self.wanted = self._finished = False
        self._blocker: int | None = None  # the group a batch waits for
        self._stored: deque[tuple[BatchTaken, list[GroupState]]] = deque()  # taken in an earlier life

    @property
    def taken(self) -> Iterable[GroupState]:
        """Groups that are in a batch and not yet trained."""
        yield from self.training
        for _, groups in self._stored:
            yield from groups

    def store(self, batch: tuple[Group, ...], groups: list[GroupState]) -> None:
        """A batch that was taken in an earlier life is taken, and trained in its turn."""
        self._stored.append((BatchTaken(self._live.next_batch, batch), groups))
        self._live.next_batch += 1

    def take_stored(self) -> Iterable[Output]:
        """The next of them, if there is one, whether generation is open or not."""
        if self._stored:
            signal, self.training = self._stored.popleft()
            self.wanted = False
            yield signal
            yield from self._departures.masked(self.training)

    def take(self, out: list[Output], *, last: bool) -> None:
        """Take the batch that is wanted, if it may be.

        Args:
            last: no prompt will be admitted any more.
        """
        if not self.wanted or self._finished:
            return
        live = self._live
        size = self._policy.groups_per_batch
        if last and len(live) < size:
            size = len(live)
            if not size:
                self._finished = True
                out.append(RolloutsFinished())
                return
        if len(live.ready) < size or self._blocked():
            return
        surplus = live.before(live.wanted)  # the youngest, however soon they are done: what is dropped at the end is no choice
        if live.ready.bisect_left(surplus) < size:
            return
        if not self._may_leave_behind(size, out):
            return
        self.training = [live.groups[group_id] for group_id in live.ready[:size]]
        for group in self.training:
            live.remove(group.prompt.id)
        step = live.next_batch
        live.next_batch += 1
        self.wanted = False
        out.append(BatchTaken(step, tuple(group.record() for group in self.training)))
        self._departures.go_on()
        out.extend(self._departures.masked(self.training))

    def surplus(self) -> Iterable[Output]:
        """Drop what is left once the last batch was taken."""
        for group in list(self._live.groups.values()) if not self._finished else ():
            yield from self._departures.drop_group(group, DropReason.OVERSAMPLED, "the last batch was full without it")

    def trained(self, event: BatchTrained) -> None:
        self._live.version = event.version.step
        self._ledger.trained(self.training)
        self._counts.trained += len(self.training)
        self._counts.members_trained += sum(group.scored for group in self.training)
        self.training = []

    def cancel(self) -> Iterable[Output]:
        """Drop every group that was not trained."""
        self._finished = True
        for group in [*self.taken, *self._live.groups.values()]:
            yield from self._departures.drop_group(group, DropReason.STOPPED, "the run was stopped")
        self.training = []
        self._stored.clear()
        yield RolloutsFinished()

    def _blocked(self) -> bool:
        """Is the group that the batch waits for still on its way?"""
        if self._blocker is not None and (self._blocker not in self._live or self._blocker in self._live.ready):
            self._blocker = None
        return self._blocker is not None

    def _may_leave_behind(self, size: int, out: list[Output]) -> bool:
        """Would every group left behind keep the staleness limit? If not: wait for the first that would not, or drop them."""
        live = self._live
        if live.ready[size - 1] == live.ranks[size - 1]:
            return True  # in order of admission: nobody's due version changes
        if self._policy.overtaking == "never":
            self._blocker = self._overtaking.unready()
            return False
        too_old = self._overtaking.too_old(size)
        if self._policy.on_stale == "wait":
            self._blocker = next(too_old, None)
            return self._blocker is None
        for group_id in list(too_old):
            out.extend(self._departures.drop_group(live.groups[group_id], DropReason.STALE, "overtaken by younger groups"))
        return True
