"""Which running member goes on elsewhere (PURE): from a crowded engine to an idle one, with its tokens.

A sequence is written slower the more run beside it. When nothing waits any more, what is left of a batch is spread unevenly;
its longest members then set the pace. One moves when the engine it leaves runs at least twice as many as the one it goes to
will (those of an engine that is several times slower than the others count as many times), and when it has much left against
what the other engine has to read again. So each move makes the load more even.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollyard.events import EngineId, Move
from rollyard.rollout.dispatch import Dispatch
from rollyard.rollout.lengths import Lengths
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.router import EngineLoad
from rollyard.rollout.state import GroupState, Member
from rollyard.types import RequestId

CROWDED = 2  # times as many requests as the other engine will have
READING = 0.25  # tokens still to come, at least, for each that is read again


@dataclass(slots=True)
class Candidates:
    """Members of an engine that had something left when they were looked at, those with the least first."""

    requests: list[RequestId] = field(default_factory=list)
    good_for: int = 0  # times more that the engine may be asked for one before all are looked at again


class Moves:
    """Members on their way from one engine to another.

    What all members of an engine have left is looked at once for as many questions as it holds members.
    """

    def __init__(self, policy: RolloutPolicy, live: LiveGroups, dispatch: Dispatch, lengths: Lengths) -> None:
        self._policy = policy
        self._live = live
        self._dispatch = dispatch
        self._lengths = lengths
        self._candidates: dict[EngineId, Candidates] = {}

    def next(self) -> Iterable[Move]:
        """Moves that make the load more even, one after the other."""
        if self._dispatch.waiting:
            self._candidates.clear()  # others will run by the time that nothing waits
            return ()
        return self._found()

    def _found(self) -> Iterable[Move]:
        crowds = self._dispatch.crowds
        while (found := crowds.uneven(CROWDED)) is not None:
            source, target = found
            best = self._best(source, target)
            if best is None:
                return
            request, member = best
            member.moves += 1
            member.target = target.id
            crowds.set_off(request, source.id, target.id)
            yield Move(source.id, request, target.id)

    def _best(self, source: EngineLoad, target: EngineLoad) -> tuple[RequestId, Member] | None:
        """The member with the most left that may go from one to the other."""
        candidates = self._candidates.setdefault(source.id, Candidates())
        if candidates.good_for <= 0:
            self._look(source.id, candidates)
        candidates.good_for -= 1
        while candidates.requests:
            request = candidates.requests.pop()
            member = self._live.running(request)
            if member is None or request in self._dispatch.crowds.going or self._dispatch.holder(request) != source.id:
                continue
            group = self._live.groups[request.group]
            if self._worth_it(group, member) and self._may(target, group):
                return request, member
        return None

    def _look(self, engine: EngineId, candidates: Candidates) -> None:
        """At all that it holds."""
        held, left = self._dispatch.held_by(engine), list[tuple[float, int, RequestId]]()
        for request in held:
            member = self._live.running(request)
            if member is not None and member.moves < self._policy.moves:
                left.append((self._lengths.remaining(self._live.groups[request.group], member), -len(left), request))
        left.sort()
        candidates.requests = [request for tokens, _, request in left if tokens > 0]
        candidates.good_for = len(held)

    def _worth_it(self, group: GroupState, member: Member) -> bool:
        return self._lengths.remaining(group, member) >= READING * group.read(member)

    def _may(self, target: EngineLoad, group: GroupState) -> bool:
        return self._dispatch.router.may_take(target.id, *self._live.allowed(group.prompt.id))
