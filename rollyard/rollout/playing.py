"""Members that play episodes (PURE): what an environment asks for becomes requests of its member, one turn after the other.

Between turns a member is with its environment and holds no engine. Its tokens are those of all turns, so failures, moves, cuts
and the staleness limit are what they are for any other member.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rollyard.events import Abort, Score
from rollyard.rollout.departures import Departures
from rollyard.rollout.dispatch import Dispatch
from rollyard.rollout.lengths import Lengths
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.state import GroupState, Member, Output, Phase
from rollyard.turns import Asked, EpisodeEnded, Play, Tell
from rollyard.types import Asking, DropReason, FinishReason, RequestId, Reward, Turn


def room_for(asking: Asking, taken: int, window: int, turns: int) -> int | FinishReason:
    """Tokens that the window leaves for one more turn; or why it is answered with none.

    Args:
        taken: turns before it.
        window: tokens of prompt and answer at most.
        turns: of an episode at most.
    """
    room = window - len(asking.prompt_ids)
    if room < 1:
        return FinishReason.CONTEXT
    return FinishReason.LENGTH if taken >= turns else room


class Playing:
    """Begins episodes, queues their turns, and completes their members."""

    def __init__(
        self, policy: RolloutPolicy, live: LiveGroups, dispatch: Dispatch, departures: Departures, lengths: Lengths
    ) -> None:
        self._policy, self._live = policy, live
        self._dispatch, self._departures, self._lengths = dispatch, departures, lengths

    def begin(self, group: GroupState) -> Iterable[Play]:
        """An episode of each member that has not ended; they ask when they are ready to."""
        for member in group.members:
            if member.phase is Phase.WAITING:
                member.phase = Phase.PLAYING
                yield Play(group.prompt, member.index)

    def asked(self, event: Asked) -> Iterable[Output]:
        """One more turn waits for an engine, unless it has no room, or was one too many."""
        group, member = self._find(event.group, event.member)
        if group is None or member is None or member.phase is not Phase.PLAYING:
            return
        asking = event.asking
        room = room_for(asking, len(member.turns), self._policy.window, self._policy.turns)
        if isinstance(room, FinishReason):
            yield self._told(member, asking, room, "")
            return
        member.clamped = room < asking.max_tokens
        member.asking = replace(asking, max_tokens=min(asking.max_tokens, room))
        member.phase = Phase.WAITING
        self._dispatch.waiting.add(member)

    def answered(self, member: Member, finish: FinishReason, text: str) -> Tell:
        """The policy has written its turn."""
        assert member.asking is not None
        if finish is FinishReason.ABORT or (finish is FinishReason.LENGTH and member.clamped):
            finish = FinishReason.CONTEXT if member.clamped else FinishReason.LENGTH
        return self._told(member, member.asking, finish, text)

    def _told(self, member: Member, asking: Asking, finish: FinishReason, text: str) -> Tell:
        """The next request is another attempt, with its own failures."""
        reply = member.reply(finish, text)
        member.turned(Turn(asking.prompt_ids, len(reply.token_ids), finish))
        member.phase, member.asking, member.engine, member.avoid = Phase.PLAYING, None, None, None
        member.attempt, member.failures = member.attempt + 1, 0
        return Tell(member.group, member.index, reply)

    def ended(self, event: EpisodeEnded) -> Iterable[Output]:
        """The member is complete; what its environment gave up while it was written makes it fail."""
        group, member = self._find(event.group, event.member)
        if group is None or member is None:
            return
        if member.phase is Phase.PLAYING:
            yield self._completed(group, member, event.verdict, event.text)
            return
        if member.phase is Phase.WAITING:
            self._dispatch.waiting.take(member)
        elif member.phase is Phase.RUNNING and member.engine is not None:
            yield Abort(member.engine, (RequestId(member.group, member.index, member.attempt),))
        else:
            return
        cause = event.verdict.problem if event.verdict is not None else ""
        cause = f"the episode ended while an answer was being written{f': {cause}' if cause else ''}"
        yield from self._departures.drop_member(group, member, DropReason.FAILED, cause)

    def _completed(self, group: GroupState, member: Member, verdict: Reward | None, text: str) -> Score:
        finish = member.turns[-1].finish if member.turns else FinishReason.ERROR
        member.phase = Phase.SCORING
        self._lengths.finished(group.prompt.row, member.tokens)
        return Score(group.prompt, member.complete(finish, text), verdict)

    def _find(self, group_id: int, index: int) -> tuple[GroupState | None, Member | None]:
        group = self._live.groups.get(group_id)
        return group, group.members[index] if group is not None else None
