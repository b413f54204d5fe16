"""A scripted engine without a model: the double for tests of everything around an engine.

It keeps every promise of `protocols.Engine` (slots, segments, pausing at token boundaries, partial tokens kept), and
breaks them on request: errors after n tokens, death, late answers, loads that are ignored or refused, wrong answers, weights
that are forgotten, a standstill. What it writes depends on the request's seed alone, so a completion cut here continues in the
same words on another.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from heapq import heappop, heappush
from itertools import count
from math import nan
from random import Random
from time import monotonic

from rollyard.engine import admission
from rollyard.errors import EngineError, EngineLost, RequestRejected, WeightSyncError
from rollyard.events import Rollover, WakePart
from rollyard.types import (
    Activity,
    Capabilities,
    EngineStats,
    FinishReason,
    Manifest,
    Request,
    RequestId,
    Segment,
    WeightVersion,
)
from rollyard.watch.spans import Burst, SpanLog, work_for

SEGMENT_TOKENS = 16
SEGMENT_S = 0.2
IDLE_S = 0.001  # between looks at requests that are all late
VOCABULARY = 97  # scripted tokens by default: 1 to 96
END = 0
BASE_GAP = 0.5  # nats between the logprobs of the weights it was loaded with and those that it was started with


@dataclass(frozen=True, slots=True)
class Script:
    """What becomes of one request.

    `token_ids` is the whole completion, from its beginning: a request that continues goes on after what it has.
    Example: Script.spell("abc"), Script((5, 6, 7), error_after=2).
    """

    token_ids: tuple[int, ...]  # [tokens]
    delay_s: float = 0.0  # before its first token here
    error_after: int | None = None  # tokens of the completion after which it ends with ERROR
    die_after: int | None = None  # tokens of the completion after which the whole engine dies

    @classmethod
    def spell(cls, text: str) -> Script:
        """A text with its code points as token ids, and END."""
        return cls((*map(ord, text), END))


class OnLoad(StrEnum):
    """What the engine does with new weights."""

    TAKE = "take"
    IGNORE = "ignore"  # says nothing is wrong and stays at its version
    REFUSE = "refuse"  # raises WeightSyncError


class Lie(StrEnum):
    """What is wrong with every segment that it writes."""

    NONE = "none"
    LOGPROBS = "logprobs"  # one too few
    POSITIVE = "positive"  # a logprob above 0
    NAN = "nan"  # a logprob that is no number
    TOKENS = "tokens"  # a token that no vocabulary has
    MORE = "more"  # a thousand tokens more than were asked for
    VERSION = "version"  # of a version that it never acknowledged
    STRANGER = "stranger"  # of a request that it was not given


def by_seed(request: Request) -> Script:
    """The default script: 1 to 24 tokens that follow from the request's seed, and END."""
    random = Random(request.seed)
    return Script((*(random.randrange(1, VOCABULARY) for _ in range(random.randint(1, 24))), END))


@dataclass(slots=True, eq=False)
class _Job:
    request: Request
    script: Script
    written: int  # tokens of the completion
    end: int  # tokens of the completion at most
    finish_at_end: FinishReason
    rank: tuple[int, int]
    due: float = 0.0  # when it may write its first token
    oldest_kv: WeightVersion | None = None
    unsent: list[int] = field(default_factory=list)

    def __lt__(self, other: _Job) -> bool:
        return self.rank < other.rank


class FakeEngine:
    """Implements `protocols.Engine` on scripts.

    Args:
        id: its name.
        slots: requests that write at once; the others wait.
        script: what becomes of a request.
        token_s: seconds between two tokens of a request.
        load_s: seconds a load takes.
        on_load: what it does with new weights; may be changed at any time, as `lie` and `pace` may: what is wrong with its
            answers, and how many times slower it is.
        window: tokens of prompt and completion at most.
        sleep: waits so many seconds; give a virtual one together with `clock`.
        clock: seconds.
    """

    def __init__(
        self,
        id: str = "fake",
        *,
        slots: int = 4,
        script: Callable[[Request], Script] = by_seed,
        token_s: float = 0.0,
        load_s: float = 0.0,
        on_load: OnLoad = OnLoad.TAKE,
        window: int = 4096,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.on_load, self.lie, self.pace = on_load, Lie.NONE, 1.0
        self._id, self._slots, self._script, self._window = id, slots, script, window
        self._token_s, self._load_s, self._sleep, self._clock = token_s, load_s, sleep, clock
        self._version: WeightVersion | None = None
        self._prepared: WeightVersion | None = None
        self._waiting: list[_Job] = []  # a heap
        self._running: list[_Job] = []
        self._arrivals = count()
        self._ready: asyncio.Queue[tuple[Segment, ...] | None] = asyncio.Queue()
        self._work, self._still = asyncio.Event(), asyncio.Event()
        self._still.set()
        self._task: asyncio.Task[None] | None = None
        self._asleep = self._paused = self._draining = self._closed = self._forgot = False
        self._moving = asyncio.Event()
        self._moving.set()
        self._cause = ""
        self._flushed_at = clock()
        self.spans = SpanLog(lambda: round(clock() * 1e9))
        self._burst = Burst(self.spans)
        self._steps = self._generated = self._prefilled = self._recomputed = 0
        self._step_s = self._busy_slot_s = 0.0

    @property
    def id(self) -> str:
        return self._id

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def version(self) -> WeightVersion | None:
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(keep=True, sleep=True, noise=True, transports=("in_place",))

    async def start(self) -> None:
        """Begin to serve."""
        self._check_alive()
        if self._task is not None:
            raise EngineError(f"engine {self._id} was started already")
        self._task = asyncio.create_task(self._serve(), name=f"engine {self._id}")
        self._task.add_done_callback(self._on_done)

    def generate(self, requests: Sequence[Request]) -> None:
        """Queue requests; all of them or none. Raises EngineError, and RequestRejected for one that can never run."""
        self._check_alive()
        admission.check(
            self._id,
            requests,
            {job.request.id for job in self._jobs()},
            started=self._task is not None,
            acknowledged=self._version is not None,
            asleep=self._asleep,
            paused=self._paused,
            draining=self._draining,
        )
        for job in [self._job(request) for request in requests]:
            heappush(self._waiting, job)
        self._note_work()

    async def segments(self) -> AsyncIterator[tuple[Segment, ...]]:
        """What was written, as it is written. Raises EngineLost once the engine is dead."""
        while (segments := await self._ready.get()) is not None:
            yield segments
        if not self._closed:
            self._check_alive()

    async def abort(self, requests: Sequence[RequestId]) -> None:
        """Cut these requests. What they wrote comes out of `segments`."""
        await self._turn()
        names = set(requests)
        self._cut([job for job in self._jobs() if job.request.id in names])

    async def pause(self, rollover: Rollover) -> None:
        """Stop at a token boundary; under DRAIN once every request has ended."""
        with self.spans.doing(Activity.SYNC, "pause"):
            await self._pause(rollover)

    async def _pause(self, rollover: Rollover) -> None:
        await self._turn()
        if rollover is Rollover.DRAIN:
            if self._paused and self._jobs():
                raise EngineError(f"engine {self._id} cannot finish what it has while it is paused: resume it first")
            self._draining = True
            await self._still.wait()
            self._check_alive()
        elif rollover is Rollover.ABORT:
            self._cut(self._jobs())
        self._paused, self._draining = True, False
        self._deliver(self._flush_all())

    async def prepare(self, manifest: Manifest) -> None:
        with self.spans.doing(Activity.SYNC, "prepare"):
            await self._turn()
            self._prepared = manifest.version

    async def load(self, version: WeightVersion) -> None:
        """Switch to `version`, unless `on_load` says otherwise. Raises WeightSyncError when it was not prepared."""
        await self._turn()
        if self._prepared != version:
            raise WeightSyncError(f"engine {self._id} was not prepared for version {tuple(version)}")
        if not self._paused and self._jobs():
            raise EngineError(f"engine {self._id} cannot change weights while it generates: pause it first")
        with self.spans.doing(Activity.SYNC, "load"):
            await self._sleep(self._load_s * self.pace)
        await self._turn()
        if self.on_load is OnLoad.REFUSE:
            raise WeightSyncError(f"engine {self._id} did not take version {tuple(version)}: it was told to refuse")
        if self.on_load is OnLoad.TAKE:
            self._version, self._forgot = version, False

    async def resume(self) -> None:
        """Go on after a pause."""
        with self.spans.doing(Activity.SYNC, "resume"):
            await self._turn()
            self._paused = self._draining = False
            self._note_work()

    async def sleep(self) -> None:
        """Raises EngineError while requests run."""
        await self._turn()
        if self._jobs():
            raise EngineError(f"engine {self._id} cannot sleep: requests run")
        self._asleep = True

    async def wake(self, part: WakePart) -> None:
        await self._turn()
        if part is WakePart.CACHE:
            self._asleep = False

    def stats(self) -> EngineStats:
        return EngineStats(
            steps=self._steps,
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            recomputed_tokens=self._recomputed,
            step_s=self._step_s,
            busy_slot_s=self._busy_slot_s,
            slots=self._slots,
        )

    async def close(self) -> None:
        """Cut what runs and end `segments`. Closing twice is harmless."""
        if self._closed:
            return
        if not self._cause:
            self._cut(self._jobs())
        self._closed = True
        self._ready.put_nowait(None)
        self._still.set()
        self._moving.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))

    def die(self, cause: str) -> None:
        """The engine is gone from now on, and what it had not sent with it."""
        self._cause = cause
        self._waiting.clear()
        self._running.clear()
        self._ready.put_nowait(None)
        self._work.clear()
        self._still.set()
        self._moving.set()
        if self._task is not None:
            self._task.cancel()

    def condemn(self, cause: str) -> None:
        """See `protocols.Engine`."""
        if not self._closed:
            self.die(cause)

    def stall(self) -> None:
        """Stand still as a stopped process does: nothing is written and no call is answered, until `go_on` or its end."""
        if not (self._cause or self._closed):
            self._moving.clear()

    def go_on(self) -> None:
        """Whoever stood still does what it was asked meanwhile."""
        self._moving.set()

    def forget(self) -> None:
        """Decode with the weights it was started with, as a server does that was started anew behind its address, until the
        next load; and say nothing of it."""
        self._forgot = True

    async def _turn(self) -> None:
        """Wait until it is no standstill. Raises EngineLost and EngineError when it is gone."""
        self._check_alive()
        await self._moving.wait()
        self._check_alive()

    async def _serve(self) -> None:
        while True:
            await self._work.wait()
            self._burst.go()
            began = self._clock()
            late = bool(self._running) and all(job.due > began for job in self._running)
            token_s = self._token_s * self.pace
            await self._sleep(max(token_s, IDLE_S) if late else token_s)
            await self._moving.wait()
            if self._work.is_set():
                self._step(began)

    def _step(self, began: float) -> None:
        """One token for each running request that is due; segments that are due go out."""
        now = self._clock()
        while self._waiting and len(self._running) < self._slots:
            job = heappop(self._waiting)
            job.due, job.oldest_kv = now + job.script.delay_s * self.pace, self._version
            self._running.append(job)
            self._prefill(job.request)
        self._burst.tick(*work_for(max((job.request.id.group for job in self._running), default=-1)))
        due = [job for job in self._running if job.due <= now]
        segments = []
        for job in due:
            finish = self._advance(job)
            if self._cause:
                return
            if finish is not None or len(job.unsent) >= SEGMENT_TOKENS:
                segments.append(self._flush(job, finish))
            if finish is not None:
                self._running.remove(job)
        if now - self._flushed_at >= SEGMENT_S:
            segments += self._flush_all()
        self._steps += 1
        self._step_s += now - began
        self._busy_slot_s += len(due) * (now - began)
        self._deliver(segments)

    def _advance(self, job: _Job) -> FinishReason | None:
        """One event in the life of a request: a failure, or its next token. The reason if it ended."""
        script = job.script
        if script.die_after is not None and job.written >= script.die_after:
            self.die(f"request {tuple(job.request.id)} was scripted to kill it")
            return None
        if script.error_after is not None and job.written >= script.error_after:
            return FinishReason.ERROR
        if job.written >= len(script.token_ids):  # a continued request may have its whole text already
            return FinishReason.STOP
        job.unsent.append(script.token_ids[job.written])
        job.written += 1
        self._generated += 1
        if job.written == len(script.token_ids):
            return FinishReason.STOP
        return job.finish_at_end if job.written == job.end else None

    def _prefill(self, request: Request) -> None:
        """Of a request that goes on, all was computed before but its newest token."""
        again = len(request.prompt_ids) + len(request.written_ids) - 1 if request.written_ids else 0
        self._recomputed += again
        self._prefilled += len(request.prompt_ids) + len(request.written_ids) - again

    def _job(self, request: Request) -> _Job:
        written, most = len(request.written_ids), request.sampling.max_tokens
        room = self._window - len(request.prompt_ids) - written
        if room < 1 or most < 1:
            raise RequestRejected(f"request {tuple(request.id)} can never run: no room for a token")
        reason = FinishReason.LENGTH if most <= room else FinishReason.CONTEXT
        rank = (request.priority, next(self._arrivals))
        return _Job(request, self._script(request), written, written + min(most, room), reason, rank)

    def _jobs(self) -> list[_Job]:
        return self._running + self._waiting

    def _cut(self, jobs: Iterable[_Job]) -> None:
        cut = list(jobs)
        self._running = [job for job in self._running if job not in cut]
        self._waiting = sorted(job for job in self._waiting if job not in cut)
        self._deliver([self._flush(job, FinishReason.ABORT) for job in cut])

    def _flush_all(self) -> list[Segment]:
        self._flushed_at = self._clock()
        return [self._flush(job, None) for job in self._running if job.unsent]

    def _flush(self, job: _Job, finish: FinishReason | None) -> Segment:
        version = self._version
        assert version is not None, "requests are taken only after a load"
        token_ids = tuple(job.unsent)
        job.unsent.clear()
        logprobs = tuple(map(logprob_of, token_ids))
        if self._forgot:
            logprobs = tuple(logprob - BASE_GAP for logprob in logprobs)
        problem = "scripted to fail" if finish is FinishReason.ERROR else ""
        segment = Segment(job.request.id, token_ids, logprobs, version, job.oldest_kv or version, finish, problem)
        return segment if self.lie is Lie.NONE else told_wrongly(segment, self.lie)

    def _deliver(self, segments: list[Segment]) -> None:
        if segments:
            self._ready.put_nowait(tuple(segments))
        self._note_work()

    def _note_work(self) -> None:
        busy = bool(self._running or self._waiting)
        if busy and not self._paused:
            self._work.set()
        else:
            self._work.clear()
            self._burst.rest()
        (self._still.clear if busy else self._still.set)()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """The serving task ended: unless it was cancelled, what it waits with has failed, and that is a death too."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.die(f"{type(error).__name__}: {error}")

    def _check_alive(self) -> None:
        if self._cause:
            raise EngineLost(f"engine {self._id} is lost: {self._cause}")
        if self._closed:
            raise EngineError(f"engine {self._id} is closed")


def logprob_of(token_id: int) -> float:
    """What it says of a token that it writes, with the weights that it was loaded with."""
    return -(1.0 + token_id % 8) / 8


def told_wrongly(segment: Segment, lie: Lie) -> Segment:
    """The same, with something wrong about it; one without tokens only where that can be."""
    ids, logprobs = segment.token_ids, segment.logprobs
    if lie is Lie.STRANGER:
        return replace(segment, request=segment.request._replace(member=segment.request.member + 1000))
    if not ids:
        return segment
    match lie:
        case Lie.LOGPROBS:
            return replace(segment, logprobs=logprobs[:-1])
        case Lie.POSITIVE:
            return replace(segment, logprobs=(*logprobs[:-1], 0.5))
        case Lie.NAN:
            return replace(segment, logprobs=(*logprobs[:-1], nan))
        case Lie.TOKENS:
            return replace(segment, token_ids=(*ids[:-1], 2**40))
        case Lie.MORE:
            return replace(segment, token_ids=(*ids, *[1] * 1000), logprobs=(*logprobs, *[-1.0] * 1000))
        case Lie.VERSION:
            return replace(segment, version=WeightVersion(segment.version.step + 1000, segment.version.incarnation))
    return segment
