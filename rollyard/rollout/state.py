"""The core's private state: groups of members on their way (PURE)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import reduce
from itertools import chain
from typing import TypeVar

from rollyard.events import EngineId, Instruction, Signal
from rollyard.types import (
    Asking,
    Completion,
    DropReason,
    FinishReason,
    Group,
    Partial,
    Prompt,
    Reply,
    RequestId,
    Reward,
    Rollout,
    Segment,
    Turn,
    VersionSpan,
)

Output = Instruction | Signal

N = TypeVar("N", int, float)
Piece = tuple[Sequence[int], Sequence[float]]  # tokens and their logprobs


class Phase(Enum):
    """Where a member is; the last two are final."""

    PLAYING = auto()  # its environment is at work
    WAITING = auto()
    RUNNING = auto()
    SCORING = auto()
    SCORED = auto()
    DROPPED = auto()


@dataclass(slots=True)
class Member:
    """One of the K completions of a prompt."""

    group: int
    index: int
    phase: Phase = Phase.WAITING
    tokens: int = 0  # of all turns
    pieces: list[Piece] = field(default_factory=list)  # which make them up
    spans: tuple[VersionSpan, ...] = ()
    turns: tuple[Turn, ...] = ()  # of an episode: those that are over
    asking: Asking | None = None  # of an episode: the turn that is wanted, while WAITING or RUNNING
    earlier: int = 0  # tokens of the turns that are over
    over: int = 0  # pieces of those
    began: int = 0  # tokens that there were when the last attempt began
    began_at: float = 0.0  # seconds on its engine's clock
    stints: tuple[tuple[EngineId, int, int], ...] = ()  # who wrote, in which epoch of it, from which token on
    attempt: int = 0
    failures: int = 0
    clamped: bool = False  # of an episode: the window leaves the turn less than was asked
    engine: EngineId | None = None  # while RUNNING
    home: EngineId | None = None  # which took it last
    avoid: EngineId | None = None  # where it failed last
    target: EngineId | None = None  # where it is being moved to
    moves: int = 0
    queued: int = 0  # tokens that an engine was to read, when it began to wait last
    completion: Completion | None = None
    reward: Reward | None = None

    def write(self, segment: Segment) -> None:
        """Append a segment's tokens; neighbouring spans of one version become one."""
        tokens = len(segment.token_ids)
        if not tokens:
            return
        self.tokens += tokens
        self.pieces.append((segment.token_ids, segment.logprobs))
        spans = self.spans
        if spans and spans[-1].version == segment.version and spans[-1].oldest_kv == segment.oldest_kv:
            tokens += spans[-1].tokens
            spans = spans[:-1]
        self.spans = (*spans, VersionSpan(segment.version, segment.oldest_kv, tokens))

    def give(self, written: Completion | Partial) -> None:
        """It has written this in an earlier life."""
        self.tokens, self.spans = len(written.token_ids), written.spans
        self.pieces = [(written.token_ids, written.logprobs)] if self.tokens else []

    def stop(self, engine: EngineId, epoch: int) -> None:
        """An attempt has ended; who wrote what it added."""
        if self.tokens > self.began:
            self.stints = (*self.stints, (engine, epoch, self.began))

    def since(self, engine: EngineId, epoch: int) -> int | None:
        """The first token that this engine wrote in this epoch."""
        return min((begin for who, when, begin in self.stints if who == engine and when == epoch), default=None)

    def forget(self, since: int) -> None:
        """Go back to its first tokens."""
        while self.tokens > since:
            ids, logprobs = self.pieces.pop()
            self.tokens -= len(ids)
            if self.tokens < since:
                left = since - self.tokens
                self.pieces.append((ids[:left], logprobs[:left]))
                self.tokens = since
        self.stints = tuple(stint for stint in self.stints if stint[2] < since)
        left, spans = since, list[VersionSpan]()
        for span in self.spans:
            if left:
                spans.append(span._replace(tokens=min(span.tokens, left)))
                left -= spans[-1].tokens
        self.spans = tuple(spans)

    def answer(self) -> Sequence[int]:
        """What it has written in this turn."""
        return () if self.tokens == self.earlier else joined([ids for ids, _ in self.pieces[self.over :]])

    def reply(self, finish: FinishReason, text: str) -> Reply:
        """The same, for its environment."""
        logprobs = () if self.tokens == self.earlier else joined([logprobs for _, logprobs in self.pieces[self.over :]])
        return Reply(self.answer(), text, finish, logprobs, after(self.spans, self.earlier))

    def turned(self, turn: Turn) -> None:
        """The turn is over."""
        self.turns = (*self.turns, turn)
        self.earlier, self.over = self.tokens, len(self.pieces)

    def complete(self, finish: FinishReason, text: str) -> Completion:
        if len(self.pieces) != 1:
            self.pieces = [(joined([ids for ids, _ in self.pieces]), joined([logprobs for _, logprobs in self.pieces]))]
        ids, logprobs = self.pieces[0]
        self.completion = Completion(self.group, self.index, ids, logprobs, self.spans, finish, text, self.turns)
        return self.completion


def after(spans: Iterable[VersionSpan], tokens: int) -> tuple[VersionSpan, ...]:
    """The spans without their first tokens."""
    left = list[VersionSpan]()
    for span in spans:
        if span.tokens > tokens:
            left.append(span._replace(tokens=span.tokens - tokens))
        tokens = max(0, tokens - span.tokens)
    return tuple(left)


def joined(pieces: Sequence[Sequence[N]]) -> Sequence[N]:
    """All of them as one. One alone stays as it is; what is no tuple, as in a simulation, knows how to add its like."""
    if len(pieces) == 1:
        return pieces[0]
    if not pieces or isinstance(pieces[0], tuple):
        return tuple(chain.from_iterable(pieces))
    whole: Sequence[N] = reduce(operator.add, pieces)
    return whole


@dataclass(slots=True)
class GroupState:
    """A live group: admitted, not yet taken for training or dropped."""

    prompt: Prompt
    members: list[Member]
    max_tokens: int  # what the window leaves, at most what sampling asks
    clamped: bool  # the window left less than was asked
    turns: int = 1  # of a member at most, each of which may be that long
    home: EngineId | None = None  # the engine that took a member last
    oldest: int | None = None  # version step of the oldest token written
    unfinished: int = 0  # members that are not final
    expected: float = 0.0  # tokens of a member; 0: to be computed again
    last_cause: str = ""  # why a member was dropped
    distrusted: bool = False  # a member was dropped since nobody believes who wrote it
    recovered: bool = False  # it was finished before a restart
    recorded: Group | None = None  # once it is finished

    @property
    def scored(self) -> int:
        return sum(member.phase is Phase.SCORED for member in self.members)

    @property
    def flat(self) -> bool:
        """All verdicts are equal: whatever is compared within the group, nothing is learned from it."""
        found = {m.reward.value for m in self.members if m.phase is Phase.SCORED and m.reward is not None}
        return len(found) < 2

    @property
    def tokens(self) -> int:
        """Written by members that may yet be trained."""
        return sum(member.tokens for member in self.members if member.phase is not Phase.DROPPED)

    def recount(self) -> None:
        """Some of its tokens were forgotten."""
        spans = (span for member in self.members for span in member.spans)
        self.oldest = min((span.version.step for span in spans), default=None)

    def left(self, member: Member) -> int:
        """Tokens that the member may still write, in this turn where it plays an episode."""
        most = self.max_tokens if member.asking is None else member.asking.max_tokens
        return most - (member.tokens - member.earlier)

    def read(self, member: Member) -> int:
        """Tokens that an engine reads before the member's next one, its own of this turn among them."""
        return len(self.prompt_ids(member)) + member.tokens - member.earlier

    def prompt_ids(self, member: Member) -> Sequence[int]:
        """What comes before what the member writes, in this turn where it plays an episode."""
        return self.prompt.token_ids if member.asking is None else member.asking.prompt_ids

    def record(self) -> Group:
        """The finished group as the trainer sees it: members that were judged, those without a verdict too."""
        if self.recorded is None:
            judged = ((m.completion, m.reward) for m in self.members)
            self.recorded = Group(self.prompt, tuple(Rollout(done, reward) for done, reward in judged if done and reward))
        return self.recorded


@dataclass(slots=True)
class TokenCounts:
    """Tokens that engines wrote for rollouts and that came, in this life or an earlier one.

    generated == trained + sum(dropped) + those of live members. What an earlier life wrote after its last checkpoint counts when
    it is told to this one, as live, or as dropped where it is not used again; what was lost with that life does not count.
    """

    generated: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)  # by reason

    def drop(self, tokens: int, reason: DropReason) -> None:
        if tokens:
            self.dropped[reason] = self.dropped.get(reason, 0) + tokens


@dataclass(slots=True)
class Counts:
    """Running totals. admitted == trained + sum(dropped) + live + in training, for prompts and for members."""

    admitted: int = 0
    trained: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    members_admitted: int = 0
    members_trained: int = 0
    members_dropped: dict[str, int] = field(default_factory=dict)
    retries: int = 0
    refills: int = 0  # prompts admitted in place of groups that were filtered
    unfiltered: int = 0  # groups that would have been filtered, had not as many been for this batch as may be
    tokens: TokenCounts = field(default_factory=TokenCounts)


class Ledger:
    """Where every token goes. What an attempt writes after it was given up is dropped for the reason of that.

    Args:
        counts: what it keeps.
    """

    def __init__(self, counts: TokenCounts) -> None:
        self._counts = counts
        self._cut: dict[RequestId, DropReason] = {}  # requests that engines still hold, of groups that left

    def came(self, segment: Segment, *, wanted: bool) -> None:
        """A segment arrived. `wanted`: its tokens were added to a member's."""
        if segment.request.group < 0:
            return  # an answer outside the rollouts, that nobody waits for any more
        self._counts.generated += len(segment.token_ids)
        if not wanted:
            self._counts.drop(len(segment.token_ids), self._cut.get(segment.request, DropReason.FAILED))
        if segment.finish is not None:
            self.ended(segment.request)

    def recovered(self, tokens: int) -> None:
        """They came in an earlier life, and a live member has them."""
        self._counts.generated += tokens

    def lost(self, tokens: int, reason: DropReason) -> None:
        """They came in an earlier life, and are not used again."""
        self._counts.generated += tokens
        self._counts.drop(tokens, reason)

    def forgotten(self, tokens: int) -> None:
        """A live member loses them again: nobody believes whoever wrote them."""
        self._counts.drop(tokens, DropReason.DISTRUSTED)

    def cut(self, request: RequestId, reason: DropReason) -> None:
        """Its group left while an engine held it."""
        self._cut[request] = reason

    def ended(self, request: RequestId) -> None:
        """No engine holds it any more."""
        self._cut.pop(request, None)

    def dropped(self, member: Member, reason: DropReason) -> None:
        """The member leaves, with what it wrote."""
        self._counts.drop(member.tokens, reason)

    def trained(self, groups: Iterable[GroupState]) -> None:
        self._counts.trained += sum(group.tokens for group in groups)
