"""What is done with the work of an engine that is not believed any more (PURE).

Tokens that it wrote before it was last proved to decode with the right weights are beyond doubt, and so is what was taken for
training: that cannot be taken back. Of the rest, answers that are not finished lose the tokens in doubt and are written anew
from there; answers that are finished are dropped, and a group that is complete with one of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from rollyard.events import Abort, EngineId
from rollyard.fitness import Unwrite
from rollyard.rollout.departures import Departures
from rollyard.rollout.dispatch import Dispatch
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.state import GroupState, Ledger, Member, Output, Phase
from rollyard.types import DropReason, RequestId


class Distrust:
    """Takes back what an engine wrote."""

    def __init__(self, live: LiveGroups, dispatch: Dispatch, departures: Departures, ledger: Ledger) -> None:
        self._live, self._dispatch, self._departures, self._ledger = live, dispatch, departures, ledger

    def take_back(self, engine: EngineId, epoch: int, cause: str) -> Iterable[Output]:
        """Everything live that this engine wrote in this epoch. It holds nothing any more."""
        for group in list(self._live.groups.values()):
            doubtful = [(member, since) for member in group.members if (since := member.since(engine, epoch)) is not None]
            if not doubtful:
                continue
            if group.prompt.id in self._live.ready:
                yield from self._departures.drop_group(group, DropReason.DISTRUSTED, cause)
                continue
            doubtful.sort(key=lambda each: each[0].phase is not Phase.SCORED)  # the last one of a group looks at the others
            for member, since in doubtful:
                yield from self._one(group, member, since, cause)
            group.recount()
            self._dispatch.learnt(group)

    def _one(self, group: GroupState, member: Member, since: int, cause: str) -> Iterable[Output]:
        if member.phase is Phase.DROPPED or group.prompt.id not in self._live:
            return
        if member.phase is Phase.SCORED:
            member.completion = member.reward = None  # it is no part of its group's record either
            group.distrusted, group.last_cause = True, cause
            yield self._departures.leave(member, DropReason.DISTRUSTED, cause)
        elif member.phase is Phase.SCORING or since < member.earlier or member.phase is Phase.PLAYING:
            yield from self._drop(group, member, cause)
        else:
            yield from self._rewrite(member, since)

    def _drop(self, group: GroupState, member: Member, cause: str) -> Iterable[Output]:
        """Also of an episode whose environment has heard what is in doubt."""
        group.distrusted = True
        if member.phase is Phase.WAITING:
            self._dispatch.waiting.take(member)
        if member.phase is Phase.RUNNING and member.engine is not None:
            request = RequestId(member.group, member.index, member.attempt)
            self._ledger.cut(request, DropReason.DISTRUSTED)
            yield Abort(member.engine, (request,))
        yield from self._departures.drop_member(group, member, DropReason.DISTRUSTED, cause)

    def _rewrite(self, member: Member, since: int) -> Iterable[Output]:
        """Its tokens from `since` on are forgotten."""
        self._ledger.forgotten(member.tokens - since)
        member.forget(since)
        if member.asking is None:
            yield Unwrite(member.group, member.index, since)
        if member.phase is Phase.RUNNING and member.engine is not None:  # it went on elsewhere meanwhile, with the same beginning
            request = RequestId(member.group, member.index, member.attempt)
            self._ledger.cut(request, DropReason.DISTRUSTED)
            yield Abort(member.engine, (request,))
            self._dispatch.again(member)
