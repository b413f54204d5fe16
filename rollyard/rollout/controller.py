"""The asyncio shell around the core: carries out what it says and reports what came of it.

It decides nothing. Instructions become calls on the source, the engines and the scorer; outcomes become events.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

from rollyard.errors import ConfigError, EngineError, EngineLost, TimeLimitExceeded
from rollyard.events import (
    Abort,
    EngineDown,
    EngineId,
    Event,
    FetchPrompts,
    Generate,
    Instruction,
    Move,
    Pause,
    PromptsOffered,
    RequestFailed,
    Resume,
    Rollover,
    RunBroken,
    Score,
    Scored,
    SegmentArrived,
    Sleep,
)
from rollyard.fitness import Condemn, EngineUnfit, WrongAnswer
from rollyard.protocols.rollouts import AwaitedSource, Engine, PromptSource, Scorer
from rollyard.rollout.answers import problem_of, wrong_tokens
from rollyard.rollout.silence import Silence
from rollyard.types import (
    Activity,
    Completion,
    FinishReason,
    Prompt,
    Request,
    RequestId,
    Reward,
    Segment,
    VersionSpan,
    WeightVersion,
)
from rollyard.watch.timeline import Phase, Timeline

LOOKS = 4  # at silent engines, in the time that they may be silent
TRIES = 10  # at a request outside the core, where every answer is wrong

Text = Callable[[Sequence[int], tuple[str, ...], FinishReason], str]


class Controller:
    """Talks to the prompt source, the engines and the scorer.

    Args:
        engines: by id.
        source: where prompts come from.
        scorer: who judges.
        text: token ids of an answer, the texts that might end it, and its finish reason -> its text.
        post: takes the events.
        broke: takes the exception that broke a task; the run cannot go on.
        timeline: generation and scoring are opened and closed on it.
        silent_s: seconds that an engine may neither write nor take a step, while it holds requests.
        vocabulary: tokens have lower numbers; 0: nobody knows.
    """

    def __init__(
        self,
        engines: Mapping[EngineId, Engine],
        source: PromptSource,
        scorer: Scorer,
        text: Text,
        post: Callable[[Event], None],
        broke: Callable[[BaseException], None],
        timeline: Timeline,
        silent_s: float = math.inf,
        vocabulary: int = 0,
    ) -> None:
        self._engines = engines
        self._source = source
        self._scorer = scorer
        self._text = text
        self._post = post
        self._broke = broke
        self._timeline = timeline
        self._written: dict[EngineId, dict[RequestId, _Written]] = {}
        self._private: dict[RequestId, _Private] = {}
        self._newest = -1  # number of a prompt
        self._unjudged: deque[Score] = deque()
        self._lost: dict[EngineId, EngineLost] = {}  # and how
        self._silence = Silence(silent_s)
        self._vocabulary = vocabulary
        self._tasks: set[asyncio.Task[None]] = set()
        self._listening: dict[EngineId, asyncio.Task[None]] = {}

    @property
    def engines(self) -> Sequence[EngineId]:
        """Those that there are."""
        return tuple(self._engines)

    def listen(self) -> None:
        """Start hearing what the engines write."""
        for engine in self._engines:
            self.join(engine)
        if self._silence.limit_s < math.inf:
            self._start(self._watch())

    def join(self, engine: EngineId) -> None:
        """There is an engine of this name: a new one, or one that has taken the place of one that was lost."""
        self._lost.pop(engine, None)
        self._silence.goes_on(engine)
        self._written.setdefault(engine, {})
        self._listening[engine] = self._start(self._listen(self._engines[engine]))

    def leave(self, engine: EngineId) -> None:
        """It holds nothing and is about to be closed: whatever it says of that is not heard."""
        self._lost[engine] = EngineLost(f"engine {engine} has left")
        self._listening.pop(engine).cancel()

    def carry_out(self, instructions: Iterable[Instruction]) -> None:
        """Begin what the instructions say, in order; requests for one engine go together."""
        requests: dict[EngineId, list[Request]] = defaultdict(list)
        for instruction in instructions:
            match instruction:
                case Generate(engine, request):
                    requests[engine].append(request)
                case FetchPrompts(count):
                    self._fetch(count)
                case Score(_, done, Reward() as verdict):
                    self._post(Scored(done.group, done.member, verdict))
                case Score():
                    self._unjudged.append(instruction)
                case Abort(engine, ids):
                    self._start(self._abort(self._engines[engine], ids))
                case Move(engine, request, _):
                    self._start(self._abort(self._engines[engine], (request,)))
                case Pause() | Sleep() | Resume() | Condemn():
                    self._mind(instruction)
        if self._unjudged:
            self._start(self._judge())
            asyncio.get_running_loop().call_soon(self._spread)
        if requests:
            self._hand_out(requests)

    def _fetch(self, count: int) -> None:
        if not self._offer(count):
            self._start(self._await_prompts(count))

    def _offer(self, count: int) -> bool:
        """False when the source has none yet."""
        with self._timeline.spans.doing(Activity.PROMPTS):
            prompts, exhausted = self._source.take(count)
        if prompts or exhausted:
            self._post(PromptsOffered(self._in_order(prompts), exhausted))
        return bool(prompts) or exhausted

    async def _await_prompts(self, count: int) -> None:
        source = cast(AwaitedSource, self._source)  # no other has none
        while not self._offer(count):
            await source.more()

    def _in_order(self, prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """Raises ConfigError for a source that does not number its prompts as the protocol says."""
        for prompt in prompts:
            if prompt.id <= self._newest:
                problem = f"the source of prompts gave number {prompt.id} after number {self._newest}"
                raise ConfigError(problem, where="prompts", remedy="number prompts in ascending order, from its cursor on")
            self._newest = prompt.id
        return tuple(prompts)

    async def complete(
        self, requests: Sequence[Request], engines: Sequence[EngineId] = (), version: WeightVersion | None = None
    ) -> list[Completion]:
        """Completions outside the core, in the order asked. Their ids are the caller's own.

        Who is asked has weights, and was not lost since this began: one that is back by now is not asked. What one takes with it
        when it is lost, or answers wrongly, is asked again, of others where there are any.

        Args:
            engines: who is asked, in turn; all when none is named.
            version: asked are those that have it, and what others wrote is wrong; None: any will do.

        Raises:
            EngineError: an engine refused a request or failed at it, or every answer to one was wrong.
            EngineLost: no engine that may be asked is left.
        """
        answers: dict[RequestId, Completion] = {}
        lost: dict[EngineId, EngineLost] = {}
        wrong: dict[RequestId, list[EngineId]] = defaultdict(list)
        while left := [request for request in requests if request.id not in answers]:
            named = engines or tuple(self._engines)
            living = [name for name in named if name not in lost and self._may_ask(name, version)]
            if not living:
                causes = {name: error for name, error in self._lost.items() if name in named} | lost
                raise next(reversed(causes.values()), EngineLost("no engine is left that has weights"))
            for asked in await self._ask(left, living, wrong, version):
                outcome = asked.done.result()
                match outcome:
                    case Completion():
                        answers[asked.request.id] = outcome
                    case EngineLost():
                        lost[asked.engine] = outcome
                    case WrongAnswer(engine, cause):
                        wrong[asked.request.id].append(engine)
                        if len(wrong[asked.request.id]) == TRIES:
                            raise EngineError(
                                f"{TRIES} answers to one request were wrong, the last one of engine {engine}: {cause}"
                            )
        return [answers[request.id] for request in requests]

    def _may_ask(self, engine: EngineId, version: WeightVersion | None) -> bool:
        """One that is being brought to its first version takes no requests."""
        if engine in self._lost or engine not in self._engines:
            return False
        has = self._engines[engine].version
        return has is not None and version in (None, has)

    async def _ask(
        self,
        requests: Sequence[Request],
        engines: Sequence[EngineId],
        wrong: Mapping[RequestId, Sequence[EngineId]],
        version: WeightVersion | None,
    ) -> list[_Private]:
        """Each of these once, not of who answered it wrongly last where there are others. All are done."""
        asked: dict[EngineId, list[Request]] = defaultdict(list)
        turns, waiting = itertools.cycle(engines), list[_Private]()
        for request in requests:
            name = next(turns)
            if len(engines) > 1 and name in wrong.get(request.id, ())[-1:]:
                name = next(turns)
            waiting.append(_Private(name, request, version, asyncio.get_running_loop().create_future()))
            self._private[request.id] = waiting[-1]
            asked[name].append(request)
        try:
            for name, batch in asked.items():
                try:
                    self._engines[name].generate(batch)
                except EngineLost as error:
                    self._lose_private(name, error)
            await asyncio.gather(*(private.done for private in waiting))
            return waiting
        finally:
            for request in requests:
                self._private.pop(request.id, None)

    async def close(self) -> None:
        """Give up what is under way."""
        self._unjudged.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------------------------------------ generation

    def _hand_out(self, requests: Mapping[EngineId, list[Request]]) -> None:
        self._timeline.open(Phase.GENERATE)
        try:
            for engine, batch in requests.items():
                self._generate(engine, batch)
        finally:
            self._timeline.close(Phase.GENERATE)

    def _generate(self, engine: EngineId, requests: list[Request]) -> None:
        """Requests go together; when an engine refuses them, one by one, so that each gets the answer that is its own."""
        try:
            self._engines[engine].generate(requests)
        except EngineError as error:
            if len(requests) > 1:
                for request in requests:
                    self._generate(engine, [request])
            else:
                self._post(RequestFailed(engine, requests[0].id, str(error), error.retryable))
            return
        for request in requests:
            self._timeline.open(Phase.GENERATE)
            self._written[engine][request.id] = _Written(request.sampling.stop, list(request.written_ids))

    async def _abort(self, engine: Engine, requests: Sequence[RequestId]) -> None:
        """An engine that is lost has nothing left to cut."""
        try:
            with suppress(EngineLost):
                await engine.abort(requests)
        except TimeLimitExceeded as error:
            self._post(EngineUnfit(engine.id, str(error)))

    def _mind(self, instruction: Pause | Sleep | Resume | Condemn) -> None:
        """Who may be silent from now on, and who is of no more use. One that is draining goes on writing."""
        match instruction:
            case Pause(engine, rollover):
                if rollover is not Rollover.DRAIN:
                    self._silence.stands(engine)
            case Sleep(engine):
                self._silence.stands(engine)
            case Resume(engine):
                self._silence.goes_on(engine)
            case Condemn(engine, cause):
                self._condemn(engine, cause)

    def _condemn(self, engine: EngineId, cause: str) -> None:
        """That it is lost is heard where it is listened to. One that cannot be taken out takes the run with it."""
        try:
            self._engines[engine].condemn(cause)
        except EngineError as error:
            self._post(RunBroken(str(error), failed=True))

    async def _watch(self) -> None:
        """Look which engines are silent. When this very process stood still meanwhile, nothing can be said of them."""
        clock, pause = asyncio.get_running_loop().time, self._silence.limit_s / LOOKS
        while True:
            due = clock() + pause
            await asyncio.sleep(pause)
            now = clock()
            if now - due > pause:
                self._silence.forgive()
            private = Counter(asked.engine for asked in self._private.values() if not asked.done.done())
            for name, engine in list(self._engines.items()):
                busy = name not in self._lost and bool(self._written.get(name) or private[name])
                if seconds := self._silence.look(name, busy, progress(engine), now):
                    self._post(EngineUnfit(name, f"it wrote nothing for {seconds:.3g} s, and requests run"))

    async def _listen(self, engine: Engine) -> None:
        clock = asyncio.get_running_loop().time
        try:
            async for segments in engine.segments():
                self._silence.heard(engine.id, clock())
                for segment in map(_honest, segments):
                    private = self._private.get(segment.request)
                    if private is not None and private.engine == engine.id:
                        self._hear_private(private, segment)
                    else:
                        problem = wrong_tokens(segment, self._vocabulary)
                        self._post(SegmentArrived(engine.id, segment, self._follow(engine.id, segment, problem), problem))
        except EngineLost as error:
            self._lose(engine.id, error)

    def _lose(self, engine: EngineId, error: EngineLost) -> None:
        for _ in self._written[engine]:
            self._timeline.close(Phase.GENERATE)
        self._written[engine].clear()
        self._lose_private(engine, error)
        self._post(EngineDown(engine, str(error)))

    def _lose_private(self, engine: EngineId, error: EngineLost) -> None:
        self._lost[engine] = error
        for private in self._private.values():
            if private.engine == engine and not private.done.done():
                private.done.set_result(error)

    def _hear_private(self, private: _Private, segment: Segment) -> None:
        """One that answers wrongly is told of as in the rollouts, and asked no more once it has ended the request."""
        if private.wrong is None and (problem := private.problem(segment, self._vocabulary)):
            private.wrong = WrongAnswer(private.engine, problem)
            self._post(private.wrong)
            if segment.finish is None:
                self._start(self._abort(self._engines[private.engine], (segment.request,)))
        if private.wrong is None:
            private.hear(segment)
        if segment.finish is None or private.done.done():
            return
        if private.wrong is not None:
            private.done.set_result(private.wrong)
        elif segment.finish in (FinishReason.ABORT, FinishReason.ERROR):
            private.done.set_exception(EngineError(segment.problem or "the request was cut"))
        else:
            private.done.set_result(private.completion(segment, self._text))

    def _follow(self, engine: EngineId, segment: Segment, problem: str) -> str:
        """Keep the tokens until the last segment; then give the text of the whole completion."""
        written = self._written[engine].get(segment.request)
        if written is None:
            return ""
        written.token_ids.extend(segment.token_ids)
        written.wrong |= bool(problem)
        if segment.finish is None:
            return ""
        del self._written[engine][segment.request]
        self._timeline.close(Phase.GENERATE)
        cut = segment.finish in (FinishReason.ABORT, FinishReason.ERROR)
        if cut or written.wrong:  # the core refuses it, and it may have no text
            return ""
        return self._text(written.token_ids, written.stop, segment.finish)

    # --------------------------------------------------------------------------------------------- scoring

    async def _judge(self) -> None:
        """What is not judged yet, one after the other, as long as verdicts come at once."""
        while self._unjudged:
            await self._score(self._unjudged.popleft())

    def _spread(self) -> None:
        """Somebody has to wait for a verdict: the others do not wait behind it."""
        for _ in range(len(self._unjudged)):
            self._start(self._judge())

    async def _score(self, instruction: Score) -> None:
        completion = instruction.completion
        self._timeline.open(Phase.SCORE)
        try:
            reward = await self._scorer.score(instruction.prompt, completion)
        finally:
            self._timeline.close(Phase.SCORE)
        self._post(Scored(completion.group, completion.member, reward))

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._broke(error)


def _honest(segment: Segment) -> Segment:
    """With tuples, which nobody changes later and which can be joined, whatever sequences an engine's shell made."""
    if isinstance(segment.token_ids, tuple) and isinstance(segment.logprobs, tuple):
        return segment
    return replace(segment, token_ids=tuple(segment.token_ids), logprobs=tuple(segment.logprobs))


def progress(engine: Engine) -> tuple[int, int]:
    """Changes with every step of an engine that says so: also while a long prompt is read."""
    stats = engine.stats()
    return stats.steps, stats.prefilled_tokens + stats.generated_tokens


@dataclass(slots=True)
class _Written:
    """What an engine wrote of a request so far."""

    stop: tuple[str, ...]
    token_ids: list[int]
    wrong: bool = False


@dataclass(slots=True)
class _Private:
    """A request outside the core, on its way."""

    engine: EngineId
    request: Request
    version: WeightVersion | None  # that is to answer; None: any
    done: asyncio.Future[Completion | EngineLost | WrongAnswer]
    wrong: WrongAnswer | None = None  # the engine has yet to end it
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def problem(self, segment: Segment, vocabulary: int) -> str:
        """What is wrong with it; empty when nothing is."""
        left = self.request.sampling.max_tokens - len(self.token_ids)
        problem = problem_of(segment, left, segment.version.step, wrong_tokens(segment, vocabulary))
        if not problem and segment.token_ids and self.version not in (None, segment.version):
            problem = f"tokens of version {tuple(segment.version)}, and {tuple(self.version or ())} was asked"
        return problem

    def hear(self, segment: Segment) -> None:
        self.token_ids.extend(segment.token_ids)
        self.logprobs.extend(segment.logprobs)
        self.spans.append(VersionSpan(segment.version, segment.oldest_kv, len(segment.token_ids)))

    def completion(self, last: Segment, text: Text) -> Completion:
        ids = tuple(self.token_ids)
        finish = last.finish or FinishReason.LENGTH
        said, group, member = text(ids, self.request.sampling.stop, finish), last.request.group, last.request.member
        return Completion(group, member, ids, tuple(self.logprobs), tuple(self.spans), finish, said)
