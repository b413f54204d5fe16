"""Which running member goes on elsewhere (PURE): from a crowded engine to an idle one, with its tokens.

A sequence is written slower the more run beside it. When nothing waits any more, what is left of a batch is spread unevenly;
its longest members then set the pace. One moves when the engine it leaves runs at least twice as many as the one it goes to
will (those of an engine that is several times slower than the others count as many times), and when it has much left against
what the other engine has to read again. So each move makes the load more even.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

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


class Moves:
    """Members on their way from one engine to another."""

    def __init__(self, policy: RolloutPolicy, live: LiveGroups, dispatch: Dispatch, lengths: Lengths) -> None:
        self._policy = policy
        self._live = live
        self._dispatch = dispatch
        self._lengths = lengths
        self._going: dict[RequestId, tuple[EngineId, EngineId]] = {}  # cut, not yet heard of: from, to

    def next(self) -> Iterable[Move]:
        """Moves that make the load more even, one after the other."""
        return self._found() if self._policy.moves and not self._dispatch.waiting else ()

    def _found(self) -> Iterable[Move]:
        self._going = {request: way for request, way in self._going.items() if self._dispatch.holds(request)}
        while (found := self._best()) is not None:
            source, target, request, member = found
            member.moves += 1
            member.target = target
            self._going[request] = (source, target)
            yield Move(source, request, target)

    def _best(self) -> tuple[EngineId, EngineId, RequestId, Member] | None:
        """The member with the most left on the most crowded engine."""
        stays = Counter({each.id: each.running for each in self._dispatch.router if not each.held and not each.leaving})
        stays.subtract(source for source, _ in self._going.values())
        comes = Counter(target for _, target in self._going.values())
        idle = [each for each in self._dispatch.router if each.open]
        if not idle:
            return None
        slow = {each.id: each.slowness for each in self._dispatch.router}
        source = max(stays, key=lambda engine: (stays[engine] * slow[engine], engine))
        target = min(idle, key=lambda each: ((stays[each.id] + comes[each.id] + 1) * each.slowness, each.id))
        if stays[source] * slow[source] < CROWDED * (stays[target.id] + comes[target.id] + 1) * target.slowness:
            return None
        best, most = None, 0.0
        for request in self._dispatch.held_by(source):
            member = self._live.running(request)
            if member is None or request in self._going or member.moves >= self._policy.moves:
                continue
            group = self._live.groups[request.group]
            left = self._lengths.remaining(group, member)
            if left > most and self._worth_it(group, member, left) and self._may(target, group):
                best, most = (source, target.id, request, member), left
        return best

    @staticmethod
    def _worth_it(group: GroupState, member: Member, left: float) -> bool:
        return left >= READING * group.read(member)

    def _may(self, target: EngineLoad, group: GroupState) -> bool:
        return self._dispatch.router.may_take(target.id, *self._live.allowed(group.prompt.id))
