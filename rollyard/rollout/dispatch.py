"""Which waiting member goes to which engine, and what engines hold (PURE)."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from rollyard.events import EngineId, Generate
from rollyard.rollout.crowds import Crowds
from rollyard.rollout.lengths import Lengths
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.router import Router
from rollyard.rollout.seeds import completion_seed
from rollyard.rollout.speed import Speeds
from rollyard.rollout.state import GroupState, Member, Output, Phase
from rollyard.rollout.waiting import Waiting
from rollyard.types import Request, RequestId, Sampling

TYPICAL = 1 / 64  # share of the newest request in the mean


class Dispatch:
    """Members that wait, requests that engines hold, and the router that joins them."""

    def __init__(self, policy: RolloutPolicy, live: LiveGroups, lengths: Lengths) -> None:
        self._policy = policy
        self._live = live
        self._lengths = lengths
        self.waiting = Waiting(live, self._expected if policy.order == "longest" else None)
        self._attempts: dict[RequestId, tuple[EngineId, int]] = {}  # requests engines hold: (engine, tokens)
        self._held: dict[EngineId, dict[RequestId, None]] = {}  # the same by engine, in order
        self._samplings: dict[tuple[int, tuple[str, ...]], Sampling] = {}
        self.router = Router()
        self.crowds = Crowds(self.router)
        self.now = 0.0  # seconds on the run's clock
        self._speeds = Speeds()
        self._stood: dict[EngineId, tuple[float, float | None]] = {}  # seconds that it stood still, and since when it does
        self._typical = 0.0  # tokens of a request

    def again(self, member: Member) -> None:
        """The same member again, keeping the tokens already written."""
        member.attempt += 1
        member.phase, member.engine = Phase.WAITING, None
        self.waiting.add(member)

    def hand_out(self, out: list[Output]) -> None:
        """Those that are due first before all others: an engine too old for them is too old for all."""
        first = self.waiting.first() if self.router.open else None
        while first is not None:
            oldest, newest = self._live.allowed(first)
            end = self._live.due_with(first)
            served = self.router.serves(oldest, newest) and self._serve(first, end, oldest, newest, out)
            if not served and not self._policy.exact:
                return
            first = self.waiting.first_after(end - 1)  # where versions are exact, a younger group may have an engine free

    def _serve(self, first: int, end: int | float, oldest: int, newest: int | None, out: list[Output]) -> bool:
        """Hand out what is due when this group is, until no engine is left for it; False then."""
        for group, member in self.waiting.in_turn(first, end):
            engine = member.target
            if engine is not None and not self.router.may_take(engine, oldest, newest):
                engine = None
            if engine is None:
                home = member.home if member.turns else group.home  # which has read how a later turn begins
                prompt_tokens, waiting = len(group.prompt_ids(member)), self.waiting.tokens
                engine = self.router.choose(oldest, newest, prompt_tokens, home, member.avoid, waiting)
            if engine is None:
                return False
            self.waiting.take(member)
            out.append(self._generate(engine, group, member))
        return True

    def learnt(self, group: GroupState) -> None:
        """There is more, or less, to say of its members' lengths."""
        group.expected = 0.0
        self.waiting.unsure(group.prompt.id)

    def _expected(self, group: GroupState) -> float:
        if not group.expected:
            group.expected = self._lengths.expected(group)
        return group.expected

    def _generate(self, engine: EngineId, group: GroupState, member: Member) -> Generate:
        request = Request(
            id=RequestId(member.group, member.index, member.attempt),
            prompt_ids=group.prompt_ids(member),
            sampling=self._sampling(group.left(member), member.asking.stop if member.asking is not None else ()),
            seed=completion_seed(self._policy.seed, member.group, member.index, len(member.turns)),
            written_ids=member.answer(),
            priority=member.group,
        )
        tokens = len(request.prompt_ids) + len(request.written_ids)
        member.phase, member.engine, member.target = Phase.RUNNING, engine, None
        member.began, member.began_at = member.tokens, self._clock(engine)
        group.home = member.home = engine
        self._attempts[request.id] = (engine, tokens)
        self._held.setdefault(engine, {})[request.id] = None
        self.router.awaited.went()
        self.router.change(engine, requests=1, tokens=tokens)
        self._live.touched.add(member.group)
        return Generate(engine, request)

    def _sampling(self, max_tokens: int, stop: tuple[str, ...]) -> Sampling:
        """That of the run, for a request. Most are alike."""
        found = self._samplings.get((max_tokens, stop))
        if found is None:
            sampling = self._policy.sampling
            found = self._samplings[max_tokens, stop] = replace(sampling, max_tokens=max_tokens, stop=sampling.stop + stop)
        return found

    def hold(self, engine: EngineId, held: bool) -> None:
        """It is being changed, or goes on: what runs all the while has stood still."""
        self.router.hold(engine, held)
        total, since = self._stood.get(engine, (0.0, None))
        total += 0.0 if held or since is None else self.now - since
        self._stood[engine] = total, self.now if held else None

    def _clock(self, engine: EngineId) -> float:
        """Seconds, but those that it stood still for new weights."""
        found = self._stood.get(engine)
        return self.now if found is None else self.now - found[0]

    def measure(self, engine: EngineId, group: GroupState, member: Member) -> None:
        """It wrote the member's attempt."""
        tokens = member.tokens - member.began
        self._typical += TYPICAL * (len(group.prompt.token_ids) + member.tokens - self._typical)
        if self._speeds.wrote(engine, tokens, self._clock(engine) - member.began_at):
            self.router.compare(self._speeds.slowness(), round(self._typical))

    def holds(self, request: RequestId) -> bool:
        """Does an engine hold this request?"""
        return request in self._attempts

    def holder(self, request: RequestId) -> EngineId | None:
        """The engine that holds this request."""
        found = self._attempts.get(request)
        return None if found is None else found[0]

    def held_by(self, engine: EngineId) -> Collection[RequestId]:
        """What this engine holds, also what was given up."""
        return self._held.get(engine, ())

    def wrote(self, request: RequestId, tokens: int) -> None:
        """The engine wrote more of it."""
        engine, before = self._attempts[request]
        self._attempts[request] = (engine, before + tokens)
        self.router.change(engine, tokens=tokens)

    def ended(self, request: RequestId) -> EngineId:
        """The engine holds it no more; which it was."""
        engine, tokens = self._attempts.pop(request)
        del self._held[engine][request]
        if self.crowds.going:
            self.crowds.landed(request)
        self.router.change(engine, requests=-1, tokens=-tokens)
        return engine

    def lose(self, engine: EngineId) -> list[RequestId]:
        """The engine is gone; the requests it held."""
        lost = list(self._held.pop(engine, ()))
        for request in lost:
            del self._attempts[request]
            self.crowds.landed(request)
        self.router.remove(engine)
        self._speeds.forget(engine)
        self._stood.pop(engine, None)
        return lost
