"""The scheduling core (PURE): which request goes where, when a group is complete, when a batch may be taken.

`step(event, now)` returns instructions for the world and signals for the other machines. Every prompt admitted
leaves exactly once, trained or dropped with a reason; no token is older than the staleness limit allows; no engine
generates on weights it did not acknowledge; while a request waits and an engine may take it, it is dispatched, or left to
engines that are about to come back (`awaited`).

What happens to members stands here; who gets which engine in `dispatch`, batches in `batches`, drops in `departures`,
episodes in `playing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping

from rollyard.events import (
    Abort,
    Admit,
    BatchTrained,
    BatchWanted,
    EngineDown,
    EngineEmptied,
    EngineHeld,
    EngineId,
    EngineLeaving,
    EngineLeft,
    EngineLoaded,
    EngineReleased,
    EnginesAwaited,
    EnginesMissed,
    EngineUp,
    Event,
    FetchPrompts,
    GenerationClosed,
    GenerationOpened,
    Move,
    PromptsOffered,
    RequestFailed,
    RolloutsCancelled,
    Score,
    Scored,
    SegmentArrived,
    Signal,
)
from rollyard.fitness import Condemn, EngineProbed, EngineUnfit, WrongAnswer
from rollyard.lives import GroupsRecovered, Wrote
from rollyard.rollout.answers import problem_of
from rollyard.rollout.batches import Batches
from rollyard.rollout.departures import Departures
from rollyard.rollout.dispatch import Dispatch
from rollyard.rollout.distrust import Distrust
from rollyard.rollout.health import Health
from rollyard.rollout.lengths import Lengths
from rollyard.rollout.live import LiveGroups
from rollyard.rollout.moving import Moves
from rollyard.rollout.playing import Playing
from rollyard.rollout.policy import RolloutPolicy
from rollyard.rollout.recovery import Recovery
from rollyard.rollout.state import Counts, GroupState, Ledger, Member, Output, Phase
from rollyard.stats import EngineNow, SlotsNow
from rollyard.turns import Asked, EpisodeEnded, Stream, Tell
from rollyard.types import DropReason, FinishReason, Prompt, RequestId, Segment, Verdict

Message = Event | Signal

UNFINISHED = (Phase.RUNNING, Phase.WAITING)


class RolloutCore:
    """Groups on their way from prompt to batch.

    Args:
        policy: the rules of this run.
        version: steps trained so far; also the number of batches taken so far.
        counts: of earlier lives, to go on from.
    """

    def __init__(self, policy: RolloutPolicy, version: int = 0, counts: Counts | None = None) -> None:
        self._policy = policy
        self._open = self._exhausted = False
        self._asked = 0
        self._leaving: set[EngineId] = set()  # engines that still hold something
        self.counts = counts or Counts()
        self._ledger = Ledger(self.counts.tokens)
        self._live = LiveGroups(policy, version)
        self._lengths = Lengths(wanted=policy.order == "longest" or policy.moves > 0)
        self._dispatch = Dispatch(policy, self._live, self._lengths)
        self._moves = Moves(policy, self._live, self._dispatch, self._lengths)
        self._router = self._dispatch.router
        self._departures = Departures(policy, self._live, self.counts, self._ledger)
        self._playing = Playing(policy, self._live, self._dispatch, self._departures, self._lengths)
        self._batches = Batches(policy, self._live, self._departures, self.counts, self._ledger, self._router.version)
        self._health = Health(policy)
        self._distrust = Distrust(self._live, self._dispatch, self._departures, self._ledger)
        self._recovery = Recovery(policy, self._live, self._departures, self._batches, self._ledger, self._group)
        self._handlers: dict[type[Message], Callable[..., Iterable[Output]]] = {
            GroupsRecovered: self._recovery.take,
            PromptsOffered: self._on_prompts,
            EngineUp: self._on_engine_up,
            EngineDown: self._on_engine_down,
            EngineLeaving: self._on_leaving,
            EngineLeft: self._on_left,
            EngineLoaded: self._on_engine_loaded,
            EngineUnfit: lambda event: self._condemn(event.engine, event.cause),
            WrongAnswer: lambda event: self._wrong(event.engine, event.cause),
            EngineProbed: self._on_probed,
            EngineHeld: lambda signal: self._on_hold(signal.engine, held=True),
            EngineReleased: lambda signal: self._on_hold(signal.engine, held=False),
            EnginesAwaited: self._on_awaited,
            EnginesMissed: self._on_missed,
            SegmentArrived: self._on_segment,
            RequestFailed: self._on_request_failed,
            Asked: self._playing.asked,
            EpisodeEnded: self._playing.ended,
            Scored: self._on_scored,
            BatchWanted: self._on_batch_wanted,
            BatchTrained: self._on_trained,
            GenerationOpened: lambda _: self._on_gate(open_=True),
            GenerationClosed: lambda _: self._on_gate(open_=False),
            RolloutsCancelled: self._on_cancelled,
        }

    @property
    def listens(self) -> Container[type[Message]]:
        """What it takes; nothing follows from anything else."""
        return self._handlers

    def step(self, message: Message, now: float) -> list[Output]:
        """Take one event or signal; return what follows from it."""
        handler = self._handlers.get(type(message))
        if handler is None:
            return []
        self._dispatch.now = now
        out = list(handler(message))
        if self._open and self._batches.wanted:
            self._batches.take(out, last=self._exhausted and not self._asked)
        if self._live.wanted <= 0:
            out.extend(self._batches.surplus())
        if self._open:
            if not self._exhausted and not self._asked:
                self._fetch(out)
            self._dispatch.hand_out(out)
            if self._policy.moves:
                out.extend(self._moves.next())
        if self._leaving:
            out.extend(self._emptied())
        return out

    def note(self, message: Message, now: float) -> list[Output]:
        """Take one event or signal that others follow at once: only what it is for its own member, group or engine."""
        self._dispatch.now = now
        handler = self._handlers.get(type(message))
        return [] if handler is None else list(handler(message))

    def _emptied(self) -> Iterable[Output]:
        for engine in [engine for engine in sorted(self._leaving) if not self._dispatch.held_by(engine)]:
            self._leaving.discard(engine)
            yield EngineEmptied(engine)

    @property
    def slow(self) -> Mapping[EngineId, int]:
        """Engines that are several times slower than the median, and how many."""
        return self._router.slow

    @property
    def engines(self) -> tuple[EngineNow, ...]:
        """What each engine holds."""
        return tuple(EngineNow(load.id, load.slots, load.running, load.version, load.held) for load in self._router)

    @property
    def waiting(self) -> int:
        """Requests that no engine has."""
        return len(self._dispatch.waiting)

    @property
    def slots(self) -> SlotsNow:
        """How full all engines are, and how many requests wait for one. Cheap."""
        return SlotsNow(self._router.running, self._router.slots, len(self._dispatch.waiting))

    @property
    def live(self) -> int:
        """Groups admitted and not yet taken or dropped."""
        return len(self._live)

    @property
    def live_tokens(self) -> int:
        """Written by members that are live, or in a batch that is not trained yet."""
        return sum(group.tokens for group in (*self._live.groups.values(), *self._batches.taken))

    # ------------------------------------------------------------------------------------------ admission

    def _fetch(self, out: list[Output]) -> None:
        """One question at a time, so that an answer is never taken for that to another question."""
        room = self._live.room()
        if room > 0:
            self._asked = room
            out.append(FetchPrompts(room))

    def _on_prompts(self, event: PromptsOffered) -> Iterable[Output]:
        self._asked = 0
        self._exhausted = event.exhausted
        for prompt in event.prompts:
            yield from self._admit(prompt)

    def _group(self, prompt: Prompt) -> GroupState:
        """A new one, counted."""
        policy = self._policy
        members = [Member(prompt.id, index) for index in range(policy.group_size)]
        room = policy.window - len(prompt.token_ids)
        max_tokens = min(policy.sampling.max_tokens, room)
        self.counts.admitted += 1
        self.counts.members_admitted += len(members)
        clamped, turns = room < policy.sampling.max_tokens, max(policy.turns, 1)
        return GroupState(prompt, members, max_tokens, clamped, turns, unfinished=len(members))

    def _admit(self, prompt: Prompt) -> Iterable[Output]:
        policy, group = self._policy, self._group(prompt)
        self._live.add(group)
        self._departures.admitted()
        yield Admit(prompt)
        yield from self._recovery.join(group)
        if not group.unfinished:
            return
        if group.max_tokens < 1:
            cause = f"the prompt has {len(prompt.token_ids)} tokens, the window {policy.window}"
            yield from self._departures.drop_group(group, DropReason.CONTEXT, cause)
            return
        if policy.turns:
            yield from self._playing.begin(group)
            return
        for member in group.members:
            if member.phase is Phase.WAITING:
                self._dispatch.waiting.add(member)

    # -------------------------------------------------------------------------------------------- engines

    def _on_engine_up(self, event: EngineUp) -> Iterable[Output]:
        version = None if event.version is None else event.version.step
        self._router.add(event.engine, event.slots, version, held=False)
        self._health.up(event.engine, event.version)
        return ()

    def _on_engine_down(self, event: EngineDown) -> Iterable[Output]:
        if event.engine in self._router:
            yield from self._lose(event.engine, event.cause)
            self._health.gone(event.engine)

    def _lose(self, engine: EngineId, cause: str) -> Iterable[Output]:
        """What it held goes on elsewhere."""
        lost = self._dispatch.lose(engine)
        self._leaving.discard(engine)
        for request in lost:
            self._ledger.ended(request)
        for request in lost:
            yield from self._fail(request, engine, cause, retryable=True)

    def _condemn(self, engine: EngineId, cause: str, *, believed: bool = True) -> Iterable[Output]:
        """It is as good as lost, and whoever runs it ends it. `believed`: what it wrote is right all the same."""
        if not cause or engine not in self._router:
            return
        yield Condemn(engine, cause)
        yield from self._lose(engine, cause)
        if not believed:
            yield from self._distrust.take_back(engine, self._health.epoch(engine), f"engine {engine} is not believed: {cause}")
        self._health.gone(engine)

    def _on_probed(self, event: EngineProbed) -> Iterable[Output]:
        if event.verdict is Verdict.VERIFIED:
            self._health.proved(event.engine)
        elif event.verdict is Verdict.CONTRADICTED:
            yield from self._condemn(event.engine, event.cause, believed=False)

    def _on_leaving(self, event: EngineLeaving) -> Iterable[Output]:
        engine = event.engine
        if engine not in self._router:
            return
        self._router.leave(engine)
        self._leaving.add(engine)
        if event.cut:
            running = [(request, self._live.running(request)) for request in self._dispatch.held_by(engine)]
            going = (request for request, member in running if member is not None and member.target is None)
            yield from (Move(engine, request, None) for request in going)

    def _on_left(self, signal: EngineLeft) -> Iterable[Output]:
        self._dispatch.lose(signal.engine)
        self._health.gone(signal.engine)
        return ()

    def _on_engine_loaded(self, event: EngineLoaded) -> Iterable[Output]:
        if event.engine in self._router:
            self._router.set_version(event.engine, event.version.step)
            self._health.took(event.engine, event.version)
        return ()

    def _on_hold(self, engine: EngineId, *, held: bool) -> Iterable[Output]:
        if engine in self._router:
            self._dispatch.hold(engine, held)
            if not held:
                self._router.awaited.discard(engine)
        return ()

    def _on_awaited(self, signal: EnginesAwaited) -> Iterable[Output]:
        if not self._policy.exact:  # else they come with weights that may be too new for what waits
            for engine in signal.engines:
                if engine in self._router:
                    self._router.expect(engine)
        return ()

    def _on_missed(self, signal: EnginesMissed) -> Iterable[Output]:
        for engine in signal.engines:
            self._router.awaited.discard(engine)
        return ()

    def _on_gate(self, *, open_: bool) -> Iterable[Output]:
        self._open = open_
        return ()

    # ------------------------------------------------------------------------------------------- segments

    def _on_segment(self, event: SegmentArrived) -> Iterable[Output]:
        segment, wrote = event.segment, len(event.segment.token_ids)
        if self._dispatch.holder(segment.request) != event.engine:
            return self._late(event)
        member = self._live.running(segment.request)
        if member is None:  # an attempt that was given up: only its slot matters
            self._account(segment)
            self._ledger.came(segment, wanted=False)
            return ()
        group = self._live.groups[member.group]
        oldest_allowed = self._live.due(member.group) - self._policy.max_staleness
        problem = problem_of(segment, group.left(member), oldest_allowed, event.problem)
        if problem or (wrote and (problem := self._health.took_none(event.engine, segment.version))):
            self._ledger.came(segment, wanted=False)
            return self._give_up(segment, event.engine, problem)
        self._account(segment)
        self._ledger.came(segment, wanted=True)
        member.write(segment)
        self._dispatch.learnt(group)
        if wrote:
            self._live.wrote(group, segment.version.step)
        out = [] if segment.finish is None else list(self._ended(event, group, member, segment.finish))
        if wrote and member.phase in UNFINISHED:
            if member.asking is None:
                out.append(Wrote(segment))
            elif member.asking.streams:
                out.append(Stream(member.group, member.index, member.tokens - member.earlier - wrote, segment.token_ids))
        return out

    def _late(self, event: SegmentArrived) -> Iterable[Output]:
        """It is of a request that the engine does not hold."""
        segment = event.segment
        self._ledger.came(segment, wanted=False)
        if segment.request.group < 0:
            return ()  # an answer outside the rollouts, that nobody waits for any more
        return self._wrong(event.engine, f"tokens of request {tuple(segment.request)}, which it does not hold")

    def _ended(self, event: SegmentArrived, group: GroupState, member: Member, finish: FinishReason) -> Iterable[Output]:
        if finish is FinishReason.ERROR:
            return self._failed(event.segment.request, event.engine, event.segment.problem)
        member.stop(event.engine, self._health.epoch(event.engine))
        self._dispatch.measure(event.engine, group, member)
        if finish is FinishReason.ABORT and group.left(member) > 0:
            self._dispatch.again(member)
            return ()
        if finish is not FinishReason.ABORT:
            self._router.awaited.ended()
            self._health.right(event.engine)
        return (self._completed(group, member, finish, event.text),)

    def _account(self, segment: Segment) -> None:
        if segment.finish is None:
            self._dispatch.wrote(segment.request, len(segment.token_ids))
        else:
            self._dispatch.ended(segment.request)

    def _give_up(self, segment: Segment, engine: EngineId, problem: str) -> Iterable[Output]:
        """Refuse what an engine wrote. Its slot stays taken until it says that the request ended."""
        if segment.finish is None:
            yield Abort(engine, (segment.request,))
        else:
            self._dispatch.ended(segment.request)
        yield from self._fail(segment.request, engine, problem, retryable=True)
        yield from self._wrong(engine, problem)

    def _wrong(self, engine: EngineId, problem: str) -> Iterable[Output]:
        yield from self._condemn(engine, self._health.wrong(engine, problem), believed=False)

    def _completed(self, group: GroupState, member: Member, finish: FinishReason, text: str) -> Score | Tell:
        if member.asking is not None:
            return self._playing.answered(member, finish, text)
        if finish is FinishReason.ABORT or (finish is FinishReason.LENGTH and group.clamped):
            finish = FinishReason.CONTEXT if group.clamped else FinishReason.LENGTH
        member.phase, member.engine = Phase.SCORING, None
        self._lengths.finished(group.prompt.row, member.tokens)
        return Score(group.prompt, member.complete(finish, text))

    # ------------------------------------------------------------------------------------------- failures

    def _on_request_failed(self, event: RequestFailed) -> Iterable[Output]:
        if not self._dispatch.holds(event.request):
            return
        engine = self._dispatch.ended(event.request)
        self._ledger.ended(event.request)
        if event.retryable:
            yield from self._failed(event.request, engine, event.cause)
        else:
            yield from self._fail(event.request, engine, event.cause, retryable=False)

    def _failed(self, request: RequestId, engine: EngineId, cause: str) -> Iterable[Output]:
        """Another engine may do it; and this one, if it fails at all that it gets, has to go."""
        yield from self._fail(request, engine, cause, retryable=True)
        yield from self._condemn(engine, self._health.failed(engine, request.group, cause))

    def _fail(self, request: RequestId, engine: EngineId, cause: str, *, retryable: bool) -> Iterable[Output]:
        member = self._live.running(request)
        if member is None:
            return
        member.stop(engine, self._health.epoch(engine))
        member.failures += 1
        if retryable and member.failures <= self._policy.retries:
            self.counts.retries += 1
            member.avoid = engine
            self._dispatch.again(member)
        else:
            group = self._live.groups[member.group]
            yield from self._departures.drop_member(group, member, DropReason.FAILED, cause)

    # -------------------------------------------------------------------------------------------- scoring

    def _on_scored(self, event: Scored) -> Iterable[Output]:
        group = self._live.groups.get(event.group)
        member = group.members[event.member] if group else None
        if group is None or member is None or member.phase is not Phase.SCORING:
            return ()
        member.reward = event.reward
        if event.reward.value is None or not math.isfinite(event.reward.value):
            return self._departures.drop_member(group, member, DropReason.NO_VERDICT, event.reward.problem)
        member.phase = Phase.SCORED
        return self._departures.settle(group)

    # -------------------------------------------------------------------------------------------- batches

    def _on_batch_wanted(self, _: BatchWanted) -> Iterable[Output]:
        self._batches.wanted = True
        return self._batches.take_stored()

    def _on_trained(self, event: BatchTrained) -> Iterable[Output]:
        self._batches.trained(event)
        return ()

    def _on_cancelled(self, _: RolloutsCancelled) -> Iterable[Output]:
        self._open = False
        yield from self._batches.cancel()
