"""Held-out prompts in a simulated run: what `evaluate` and `rollout.controller.complete` do in a run, with modelled engines."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

from rollyard import events as ev
from rollyard.evaluate import Evaluation, Evaluator
from rollyard.plan.clock import Clock
from rollyard.plan.engines import Engines
from rollyard.plan.tokens import Told
from rollyard.types import Completion, Request, RequestId, Reward, Segment, VersionSpan
from rollyard.watch.recorder import Recorder
from rollyard.watch.timeline import Phase, Timeline

TURNS = 2  # until whoever waits for the last answer, or verdict, goes on


class Evaluations:
    """One after the other.

    Args:
        evaluator: knows what is asked.
        judging: takes a completion, and what is to be done with its verdict.
        post: takes the events.
    """

    def __init__(
        self,
        clock: Clock,
        engines: Engines,
        evaluator: Evaluator,
        judging: Callable[[Completion, Callable[[Reward], None]], None],
        post: Callable[[ev.Event], None],
        timeline: Timeline,
        recorder: Recorder,
    ) -> None:
        self._clock, self._engines, self._evaluator, self._judging = clock, engines, evaluator, judging
        self._post, self._timeline, self._recorder = post, timeline, recorder
        self._told: ev.Evaluate | None = None
        self._left: dict[RequestId, Request] = {}  # that have no answer
        self._asked: dict[RequestId, ev.EngineId] = {}  # who is at it
        self._lost: set[ev.EngineId] = set()  # since this began
        self._written: dict[RequestId, int] = {}  # tokens of answers that go on
        self._answers: dict[RequestId, Completion] = {}
        self._rewards: list[Reward] = []

    def begin(self, told: ev.Evaluate) -> None:
        """Every prompt is asked of those that have the version."""
        self._told, self._lost, self._answers, self._rewards = told, set(), {}, []
        self._left = {request.id: request for _, request in self._evaluator.requests()}
        self._timeline.open(Phase.EVAL)
        self._ask()

    def hear(self, engine: ev.EngineId, segment: Segment) -> None:
        """What an engine wrote for it. Of tokens only how many there are counts."""
        if self._asked.get(segment.request) != engine:
            return
        written = self._written.get(segment.request, 0) + len(segment.token_ids)
        if segment.finish is None:
            self._written[segment.request] = written
            return
        del self._left[segment.request]
        self._written.pop(segment.request, None)
        (group, member, _), tokens = segment.request, Told(written)
        span = VersionSpan(segment.version, segment.oldest_kv, written)
        self._answers[segment.request] = Completion(group, member, tokens, tokens, (span,), segment.finish, "")
        self._answered(segment.request)

    def gone(self, engine: ev.EngineId) -> None:
        """It is lost; what it had is asked again once the others are done."""
        self._lost.add(engine)
        for request in [request for request, asked in self._asked.items() if asked == engine]:
            self._written.pop(request, None)
            self._answered(request)

    def _answered(self, request: RequestId) -> None:
        del self._asked[request]
        if not self._asked:
            self._clock.turns(self._ask, TURNS)

    def _ask(self) -> None:
        told = self._told
        assert told is not None
        if not self._left:
            self._judge()
            return
        named = told.engines or tuple(seat.name for seat in self._engines)
        living = [name for name in named if name not in self._lost and self._may_ask(name)]
        if not living:
            self._timeline.close(Phase.EVAL)
            self._post(ev.EvaluationCut(told.version))
            return
        asked: dict[ev.EngineId, list[Request]] = {}
        for request, name in zip(self._left.values(), itertools.cycle(living), strict=False):
            self._asked[request.id] = name
            asked.setdefault(name, []).append(request)
        for name, requests in asked.items():
            self._engines.generate(name, requests)

    def _may_ask(self, engine: ev.EngineId) -> bool:
        assert self._told is not None
        if engine not in self._engines:
            return False
        seat = self._engines[engine]
        return not seat.lost and seat.model.version == self._told.version

    def _judge(self) -> None:
        """All at once, in the order in which they were asked for."""
        if not self._answers:
            self._done()
        for _, request in self._evaluator.requests() if self._answers else ():
            self._clock.soon(partial(self._judging, self._answers[request.id], self._judged))

    def _judged(self, reward: Reward) -> None:
        self._rewards.append(reward)
        if len(self._rewards) == len(self._answers):
            self._clock.turns(self._done, TURNS)

    def _done(self) -> None:
        told, evaluator = self._told, self._evaluator
        assert told is not None
        self._timeline.close(Phase.EVAL)
        tokens = sum(len(done.token_ids) for done in self._answers.values())
        found = Evaluation.of(self._rewards, len(evaluator.prompts) * evaluator.samples, tokens)
        self._recorder.evaluated(told.version, found.mean_reward, found.samples, found.unscored, found.parts, found.tokens)
        self._post(ev.Evaluated(told.version))
