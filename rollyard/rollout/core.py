"""The scheduling core (PURE): which request goes where, when a group is complete, when a batch may be taken.

`step(event, now)` returns instructions for the world and signals for the other machines. Every prompt admitted
leaves exactly once, trained or dropped with a reason; no token is older than the staleness limit allows; no engine
generates on weights it did not acknowledge; while a request waits and an engine may take it, it is dispatched.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

from sortedcontainers import SortedList

from rollyard.events import (
    Abort,
    Admit,
    BatchTaken,
    BatchTrained,
    BatchWanted,
    Drop,
    EngineDown,
    EngineHeld,
    EngineId,
    EngineLoaded,
    EngineReleased,
    EngineUp,
    Event,
    FetchPrompts,
    Generate,
    GenerationClosed,
    GenerationOpened,
    Instruction,
    PromptsOffered,
    RequestFailed,
    RolloutsCancelled,
    RolloutsFailed,
    RolloutsFinished,
    Score,
    Scored,
    SegmentArrived,
    Signal,
)
from rollyard.rollout.router import Router
from rollyard.rollout.seeds import completion_seed
from rollyard.rollout.staleness import due, fresh_enough, most_live
from rollyard.rollout.state import Counts, GroupState, Ledger, Member, Phase, problem_of
from rollyard.types import DropReason, FinishReason, Prompt, Request, RequestId, Sampling, Segment

Output = Instruction | Signal
Message = Event | Signal


@dataclass(frozen=True, slots=True)
class RolloutPolicy:
    """What the core is told once. `batches` counts the batches of the whole run, also those before a resume."""

    group_size: int
    groups_per_batch: int
    batches: int
    sampling: Sampling
    window: int  # tokens of prompt and completion at most
    max_staleness: int = 0
    exact: bool = False  # a group is written by the oldest version that the limit allows, and by no other
    max_live_groups: int = 0  # 0: no other cap than the staleness rule
    overtaking: Literal["allow", "never"] = "allow"
    on_stale: Literal["wait", "drop"] = "wait"
    retries: int = 2
    min_scored: int = 2
    give_up_after: int = 100  # prompts dropped in a row
    seed: int = 0


class RolloutCore:
    """Groups on their way from prompt to batch.

    Args:
        policy: the rules of this run.
        version: steps trained so far; also the number of batches taken so far.
    """

    def __init__(self, policy: RolloutPolicy, version: int = 0) -> None:
        self._policy = policy
        self._first = self._version = self._next_batch = version
        self._groups: dict[int, GroupState] = {}
        self._ranks: SortedList[int] = SortedList()  # live group ids, in order of admission
        self._ready: SortedList[int] = SortedList()  # live groups that could be trained
        self._training: list[GroupState] = []
        self._waiting: list[tuple[int, int]] = []  # heap of (group, member); entries may be out of date
        self._attempts: dict[RequestId, tuple[EngineId, int]] = {}  # requests engines hold: (engine, tokens)
        self._router = Router()
        self._open = self._wanted = self._exhausted = self._finished = False
        self._asked = 0
        self._blocker: int | None = None  # the group a batch waits for
        self._dropped_in_row = 0
        self.counts = Counts()
        self._ledger = Ledger(self.counts.tokens)
        self._handlers: dict[type[Message], Callable[..., Iterable[Output]]] = {
            PromptsOffered: self._on_prompts,
            EngineUp: self._on_engine_up,
            EngineDown: self._on_engine_down,
            EngineLoaded: self._on_engine_loaded,
            EngineHeld: lambda signal: self._on_hold(signal.engine, held=True),
            EngineReleased: lambda signal: self._on_hold(signal.engine, held=False),
            SegmentArrived: self._on_segment,
            RequestFailed: self._on_request_failed,
            Scored: self._on_scored,
            BatchWanted: self._on_batch_wanted,
            BatchTrained: self._on_trained,
            GenerationOpened: lambda _: self._on_gate(open_=True),
            GenerationClosed: lambda _: self._on_gate(open_=False),
            RolloutsCancelled: self._on_cancelled,
        }

    def step(self, message: Message, now: float) -> list[Output]:
        """Take one event or signal; return what follows from it."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return []
        out = list(handler(message))
        if self._open:
            self._take(out)
            self._fetch(out)
            self._dispatch(out)
        return out

    @property
    def live(self) -> int:
        """Groups admitted and not yet taken or dropped."""
        return len(self._groups)

    @property
    def live_tokens(self) -> int:
        """Written by members that are live or being trained."""
        return sum(group.tokens for group in (*self._groups.values(), *self._training))

    # ------------------------------------------------------------------------------------------ admission

    def _room(self) -> int:
        policy = self._policy
        most = most_live(self._version, self._next_batch, policy.batches, policy.max_staleness, policy.groups_per_batch)
        if policy.max_live_groups:
            most = min(most, policy.max_live_groups)
        return most - len(self._groups)

    def _fetch(self, out: list[Output]) -> None:
        """One question at a time, so that an answer is never taken for that to another question."""
        room = 0 if self._exhausted or self._asked else self._room()
        if room > 0:
            self._asked = room
            out.append(FetchPrompts(room))

    def _on_prompts(self, event: PromptsOffered) -> Iterable[Output]:
        self._asked = 0
        self._exhausted = event.exhausted
        for prompt in event.prompts:
            yield from self._admit(prompt)

    def _admit(self, prompt: Prompt) -> Iterable[Output]:
        policy = self._policy
        members = [Member(prompt.id, index) for index in range(policy.group_size)]
        room = policy.window - len(prompt.token_ids)
        max_tokens = min(policy.sampling.max_tokens, room)
        group = GroupState(prompt, members, max_tokens, clamped=room < policy.sampling.max_tokens, unfinished=len(members))
        self._groups[prompt.id] = group
        self._ranks.add(prompt.id)
        self.counts.admitted += 1
        self.counts.members_admitted += len(members)
        yield Admit(prompt)
        if room < 1:
            cause = f"the prompt has {len(prompt.token_ids)} tokens, the window {policy.window}"
            yield from self._drop_group(group, DropReason.CONTEXT, cause)
            return
        for member in members:
            heapq.heappush(self._waiting, (member.group, member.index))

    # ------------------------------------------------------------------------------------------- dispatch

    def _due(self, group_id: int) -> int:
        return due(self._next_batch, self._ranks.index(group_id), self._policy.groups_per_batch)

    def _dispatch(self, out: list[Output]) -> None:
        """Oldest groups first. They are due first, so an engine too old for the first is too old for all."""
        passed: list[tuple[int, int]] = []
        while self._waiting:
            group_id, index = self._waiting[0]
            group = self._groups.get(group_id)
            member = group.members[index] if group else None
            if group is None or member is None or member.phase is not Phase.WAITING:
                heapq.heappop(self._waiting)
                continue
            engine = self._router.choose(*self._allowed(group_id), len(group.prompt.token_ids), group.home, member.avoid)
            if engine is None and not self._policy.exact:
                return
            heapq.heappop(self._waiting)
            if engine is None:
                passed.append((group_id, index))  # where versions are exact, a younger group may have an engine free
            else:
                out.append(self._generate(engine, group, member))
        self._waiting = passed

    def _allowed(self, group_id: int) -> tuple[int, int | None]:
        """The oldest and the newest version that may work for a group; None: however new."""
        oldest = self._due(group_id) - self._policy.max_staleness
        return oldest, max(oldest, self._first) if self._policy.exact else None

    def _generate(self, engine: EngineId, group: GroupState, member: Member) -> Generate:
        request = Request(
            id=RequestId(member.group, member.index, member.attempt),
            prompt_ids=group.prompt.token_ids,
            sampling=replace(self._policy.sampling, max_tokens=self._left(group, member)),
            seed=completion_seed(self._policy.seed, member.group, member.index),
            written_ids=tuple(member.token_ids),
            priority=member.group,
        )
        tokens = len(request.prompt_ids) + len(request.written_ids)
        member.phase, member.engine = Phase.RUNNING, engine
        group.home = engine
        self._attempts[request.id] = (engine, tokens)
        self._router.change(engine, requests=1, tokens=tokens)
        return Generate(engine, request)

    @staticmethod
    def _left(group: GroupState, member: Member) -> int:
        return group.max_tokens - len(member.token_ids)

    # -------------------------------------------------------------------------------------------- engines

    def _on_engine_up(self, event: EngineUp) -> Iterable[Output]:
        version = None if event.version is None else event.version.step
        self._router.add(event.engine, event.slots, version, held=False)
        return ()

    def _on_engine_down(self, event: EngineDown) -> Iterable[Output]:
        if event.engine not in self._router:
            return
        lost = [request for request, (engine, _) in self._attempts.items() if engine == event.engine]
        for request in lost:
            del self._attempts[request]
            self._ledger.ended(request)
        self._router.remove(event.engine)
        for request in lost:
            yield from self._fail(request, event.engine, event.cause, retryable=True)

    def _on_engine_loaded(self, event: EngineLoaded) -> Iterable[Output]:
        if event.engine in self._router:
            self._router.set_version(event.engine, event.version.step)
        return ()

    def _on_hold(self, engine: EngineId, *, held: bool) -> Iterable[Output]:
        if engine in self._router:
            self._router.hold(engine, held)
        return ()

    def _on_gate(self, *, open_: bool) -> Iterable[Output]:
        self._open = open_
        return ()

    # ------------------------------------------------------------------------------------------- segments

    def _on_segment(self, event: SegmentArrived) -> Iterable[Output]:
        segment = event.segment
        if segment.request not in self._attempts:
            self._ledger.came(segment, wanted=False)
            self.counts.late_segments += 1
            return
        member = self._member(segment.request)
        group = self._groups.get(segment.request.group)
        if member is not None and group is not None:
            oldest_allowed = self._due(group.prompt.id) - self._policy.max_staleness
            if problem := problem_of(segment, self._left(group, member), oldest_allowed):
                self._ledger.came(segment, wanted=False)
                yield from self._give_up(segment, event.engine, problem)
                return
        self._account(segment)
        self._ledger.came(segment, wanted=member is not None)
        if member is None or group is None:
            return  # an attempt that was given up: only its slot mattered
        member.write(segment)
        if segment.token_ids:
            step = segment.version.step
            group.oldest = step if group.oldest is None else min(group.oldest, step)
        if segment.finish is None:
            return
        if segment.finish is FinishReason.ERROR:
            yield from self._fail(segment.request, event.engine, segment.problem, retryable=True)
        elif segment.finish is FinishReason.ABORT and self._left(group, member) > 0:
            self._requeue(member)
        else:
            yield self._completed(group, member, segment.finish, event.text)

    def _account(self, segment: Segment) -> None:
        engine, tokens = self._attempts[segment.request]
        written = len(segment.token_ids)
        if segment.finish is None:
            self._attempts[segment.request] = (engine, tokens + written)
            self._router.change(engine, tokens=written)
        else:
            del self._attempts[segment.request]
            self._router.change(engine, requests=-1, tokens=-tokens)

    def _give_up(self, segment: Segment, engine: EngineId, problem: str) -> Iterable[Output]:
        """Refuse what an engine wrote. Its slot stays taken until it says that the request ended."""
        if segment.finish is None:
            yield Abort(engine, (segment.request,))
        else:
            _, tokens = self._attempts.pop(segment.request)
            self._router.change(engine, requests=-1, tokens=-tokens)
        yield from self._fail(segment.request, engine, problem, retryable=True)

    def _completed(self, group: GroupState, member: Member, finish: FinishReason, text: str) -> Score:
        if finish is FinishReason.ABORT or (finish is FinishReason.LENGTH and group.clamped):
            finish = FinishReason.CONTEXT if group.clamped else FinishReason.LENGTH
        member.phase, member.engine = Phase.SCORING, None
        return Score(group.prompt, member.complete(finish, text))

    def _member(self, request: RequestId) -> Member | None:
        """The member this attempt works for, None when the attempt was given up or its group has left."""
        group = self._groups.get(request.group)
        if group is None:
            return None
        member = group.members[request.member]
        return member if member.phase is Phase.RUNNING and member.attempt == request.attempt else None

    # ------------------------------------------------------------------------------------------- failures

    def _on_request_failed(self, event: RequestFailed) -> Iterable[Output]:
        if event.request not in self._attempts:
            return
        engine, tokens = self._attempts.pop(event.request)
        self._ledger.ended(event.request)
        self._router.change(engine, requests=-1, tokens=-tokens)
        yield from self._fail(event.request, engine, event.cause, retryable=event.retryable)

    def _fail(self, request: RequestId, engine: EngineId, cause: str, *, retryable: bool) -> Iterable[Output]:
        member = self._member(request)
        if member is None:
            return
        member.failures += 1
        if retryable and member.failures <= self._policy.retries:
            self.counts.retries += 1
            member.avoid = engine
            self._requeue(member)
        else:
            yield from self._drop_member(self._groups[member.group], member, DropReason.FAILED, cause)

    def _requeue(self, member: Member) -> None:
        """The same member again, keeping the tokens already written."""
        member.attempt += 1
        member.phase, member.engine = Phase.WAITING, None
        heapq.heappush(self._waiting, (member.group, member.index))

    # -------------------------------------------------------------------------------------------- scoring

    def _on_scored(self, event: Scored) -> Iterable[Output]:
        group = self._groups.get(event.group)
        member = group.members[event.member] if group else None
        if group is None or member is None or member.phase is not Phase.SCORING:
            return
        member.reward = event.reward
        if event.reward.value is None or not math.isfinite(event.reward.value):
            yield from self._drop_member(group, member, DropReason.NO_VERDICT, event.reward.problem)
            return
        member.phase = Phase.SCORED
        yield from self._settle(group)

    def _drop_member(self, group: GroupState, member: Member, reason: DropReason, cause: str) -> Iterable[Output]:
        group.last_cause = cause
        yield self._leave(member, reason, cause)
        yield from self._settle(group)

    def _leave(self, member: Member, reason: DropReason, cause: str) -> Drop:
        self._ledger.dropped(member, reason)
        member.phase, member.engine = Phase.DROPPED, None
        dropped = self.counts.members_dropped
        dropped[reason] = dropped.get(reason, 0) + 1
        return Drop(member.group, member.index, reason, cause)

    def _settle(self, group: GroupState) -> Iterable[Output]:
        """One more member is final. When all are, the group is ready or leaves."""
        group.unfinished -= 1
        if group.unfinished:
            return
        if group.scored >= self._policy.min_scored:
            self._ready.add(group.prompt.id)
            self._dropped_in_row = 0
            return
        cause = f"{group.scored} of {len(group.members)} members have a verdict, {self._policy.min_scored} are needed"
        cause += f"; {group.last_cause}" if group.last_cause else ""
        yield from self._drop_group(group, DropReason.FAILED, cause)

    def _drop_group(self, group: GroupState, reason: DropReason, cause: str) -> Iterable[Output]:
        held = [(m.engine, RequestId(m.group, m.index, m.attempt)) for m in group.members if m.engine is not None]
        for member in group.members:
            if member.phase is not Phase.DROPPED:
                yield self._leave(member, reason, cause)
        for engine, request in held:
            self._ledger.cut(request, reason)
            yield Abort(engine, (request,))
        self._remove(group)
        dropped = self.counts.dropped
        dropped[reason] = dropped.get(reason, 0) + 1
        yield Drop(group.prompt.id, None, reason, cause)
        self._dropped_in_row += 1
        if self._dropped_in_row == self._policy.give_up_after and reason is not DropReason.STOPPED:
            yield RolloutsFailed(f"{self._dropped_in_row} prompts in a row were dropped, the last one: {cause}")

    def _remove(self, group: GroupState) -> None:
        group_id = group.prompt.id
        self._groups.pop(group_id, None)
        self._ranks.discard(group_id)
        self._ready.discard(group_id)

    # -------------------------------------------------------------------------------------------- batches

    def _on_batch_wanted(self, _: BatchWanted) -> Iterable[Output]:
        self._wanted = True
        return ()

    def _take(self, out: list[Output]) -> None:
        if not self._wanted or self._finished:
            return
        size = self._policy.groups_per_batch
        if self._exhausted and not self._asked and len(self._groups) < size:
            size = len(self._groups)
            if not size:
                self._finished = True
                out.append(RolloutsFinished())
                return
        if len(self._ready) < size or self._blocked():
            return
        chosen = [self._ready[position] for position in range(size)]
        if not self._may_leave_behind(chosen, out):
            return
        self._training = [self._groups[group_id] for group_id in chosen]
        for group in self._training:
            self._remove(group)
        step = self._next_batch
        self._next_batch += 1
        self._wanted = False
        out.append(BatchTaken(step, tuple(group.record() for group in self._training)))

    def _blocked(self) -> bool:
        """Is the group that the batch waits for still on its way?"""
        if self._blocker in self._groups and self._blocker not in self._ready:
            return True
        self._blocker = None
        return False

    def _may_leave_behind(self, chosen: list[int], out: list[Output]) -> bool:
        """Would every group left behind keep the staleness limit? If not: wait for the first that would not, or drop them."""
        if chosen == list(self._ranks[: len(chosen)]):
            return True  # in order of admission: nobody's due version changes
        if self._policy.overtaking == "never":
            self._blocker = next(g for g in self._ranks if g not in self._ready)
            return False
        taken = set(chosen)
        left = [group_id for group_id in self._ranks if group_id not in taken]
        too_old = [group_id for rank, group_id in enumerate(left) if not self._keeps_limit(group_id, rank)]
        if not too_old:
            return True
        if self._policy.on_stale == "wait":
            self._blocker = too_old[0]
            return False
        for group_id in too_old:
            out.extend(self._drop_group(self._groups[group_id], DropReason.STALE, "overtaken by younger groups"))
        return True

    def _keeps_limit(self, group_id: int, rank: int) -> bool:
        group = self._groups[group_id]
        steps = [] if group.oldest is None else [group.oldest]
        for member in group.members:
            version = self._router.version(member.engine) if member.engine is not None else None
            if version is not None:
                steps.append(version)
        due_version = due(self._next_batch + 1, rank, self._policy.groups_per_batch)
        return fresh_enough(min(steps, default=None), due_version, self._policy.max_staleness)

    def _on_trained(self, event: BatchTrained) -> Iterable[Output]:
        self._version = event.version.step
        self._ledger.trained(self._training)
        self.counts.trained += len(self._training)
        self.counts.members_trained += sum(group.scored for group in self._training)
        self._training = []
        return ()

    def _on_cancelled(self, _: RolloutsCancelled) -> Iterable[Output]:
        self._open, self._finished = False, True
        for group in [*self._training, *self._groups.values()]:
            yield from self._drop_group(group, DropReason.STOPPED, "the run was stopped")
        self._training = []
        yield RolloutsFinished()
