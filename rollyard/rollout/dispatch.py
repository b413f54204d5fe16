"""Which waiting member goes to which engine, and what engines hold (PURE)."""

from __future__ import annotations

import heapq
from dataclasses import replace

from rollyard.events import EngineId, Generate
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.router import Router
from rollyard.rollout.seeds import completion_seed
from rollyard.rollout.state import GroupState, Member, Output, Phase
from rollyard.types import Request, RequestId


class Dispatch:
    """Members that wait, requests that engines hold, and the router that joins them."""

    def __init__(self, policy: RolloutPolicy, live: LiveGroups) -> None:
        self._policy = policy
        self._live = live
        self._waiting: list[tuple[int, int]] = []  # heap of (group, member); entries may be out of date
        self._attempts: dict[RequestId, tuple[EngineId, int]] = {}  # requests engines hold: (engine, tokens)
        self.router = Router()

    def wait(self, member: Member) -> None:
        heapq.heappush(self._waiting, (member.group, member.index))

    def again(self, member: Member) -> None:
        """The same member again, keeping the tokens already written."""
        member.attempt += 1
        member.phase, member.engine = Phase.WAITING, None
        self.wait(member)

    def hand_out(self, out: list[Output]) -> None:
        """Oldest groups first. They are due first, so an engine too old for the first is too old for all."""
        passed: list[tuple[int, int]] = []
        while self._waiting:
            group_id, index = self._waiting[0]
            group = self._live.groups.get(group_id)
            member = group.members[index] if group else None
            if group is None or member is None or member.phase is not Phase.WAITING:
                heapq.heappop(self._waiting)
                continue
            allowed = self._live.allowed(group_id)
            engine = self.router.choose(*allowed, len(group.prompt.token_ids), group.home, member.avoid)
            if engine is None and not self._policy.exact:
                return
            heapq.heappop(self._waiting)
            if engine is None:
                passed.append((group_id, index))  # where versions are exact, a younger group may have an engine free
            else:
                out.append(self._generate(engine, group, member))
        self._waiting = passed

    def _generate(self, engine: EngineId, group: GroupState, member: Member) -> Generate:
        request = Request(
            id=RequestId(member.group, member.index, member.attempt),
            prompt_ids=group.prompt.token_ids,
            sampling=replace(self._policy.sampling, max_tokens=group.left(member)),
            seed=completion_seed(self._policy.seed, member.group, member.index),
            written_ids=tuple(member.token_ids),
            priority=member.group,
        )
        tokens = len(request.prompt_ids) + len(request.written_ids)
        member.phase, member.engine = Phase.RUNNING, engine
        group.home = engine
        self._attempts[request.id] = (engine, tokens)
        self.router.change(engine, requests=1, tokens=tokens)
        return Generate(engine, request)

    def holds(self, request: RequestId) -> bool:
        """Does an engine hold this request?"""
        return request in self._attempts

    def wrote(self, request: RequestId, tokens: int) -> None:
        """The engine wrote more of it."""
        engine, before = self._attempts[request]
        self._attempts[request] = (engine, before + tokens)
        self.router.change(engine, tokens=tokens)

    def ended(self, request: RequestId) -> EngineId:
        """The engine holds it no more; which it was."""
        engine, tokens = self._attempts.pop(request)
        self.router.change(engine, requests=-1, tokens=-tokens)
        return engine

    def lose(self, engine: EngineId) -> list[RequestId]:
        """The engine is gone; the requests it held."""
        lost = [request for request, (holder, _) in self._attempts.items() if holder == engine]
        for request in lost:
            del self._attempts[request]
        self.router.remove(engine)
        return lost
