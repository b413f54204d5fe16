"""An engine that is a running SGLang server: one streamed HTTP request for each completion.

Pausing and new weights go through the server's control routes. A server whose words show weights that were not loaded
by this engine was started anew: it is lost, and nothing that it wrote counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

from rollyard.engine import admission
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.closing import attempt
from rollyard.engine.http import Client, ServerRefused
from rollyard.engine.sglang.control import Control, label_of
from rollyard.engine.sglang.event import News
from rollyard.engine.sglang.job import Job
from rollyard.engine.sglang.server import About
from rollyard.engine.sglang.totals import Totals
from rollyard.engine.written import Written
from rollyard.errors import EngineError, EngineLost, TimeLimitExceeded, WeightSyncError
from rollyard.events import Rollover, WakePart
from rollyard.model.architecture import Architecture
from rollyard.model.tokenizer import Tokenizer
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
from rollyard.watch.spans import SpanLog

SEGMENT_S = 0.2
CUT_S = 5.0  # seconds a server may take to end what it was told to; then the line is closed
AGAIN_S = 0.5  # it forgets an order about a request that it does not know yet, so the order is repeated


class SGLangEngine:
    """Implements `protocols.Engine` over HTTP.

    Args:
        id: its name.
        client: of its server; closed with the engine.
        architecture: of the policy: its vocabulary and its end-of-sequence tokens.
        tokenizer: finds stop strings.
        slots: requests at a time, unless the server has room for fewer.
        window: tokens of prompt and completion at most; the server keeps some of its own to itself.
        start_s: seconds the server may take to be there.
        sync_s: seconds that switching to new weights may take.
        drain_s: seconds that finishing what runs may take.
    """

    def __init__(
        self,
        id: str,
        client: Client,
        architecture: Architecture,
        tokenizer: Tokenizer,
        *,
        slots: int,
        window: int,
        start_s: float,
        sync_s: float,
        drain_s: float,
    ) -> None:
        self._id, self._client, self._architecture, self._tokenizer = id, client, architecture, tokenizer
        self._window = window
        self._drain_s = drain_s
        self._control = Control(id, client, start_s, sync_s)
        self._about: About | None = None
        self._version: WeightVersion | None = None
        self._prepared: Manifest | None = None
        self._loads: dict[str, tuple[int, WeightVersion]] = {}  # by what the server calls a version: its last load
        self._load_count = 0
        # No more are sent than run at once: what waits here has no cache of older weights, and goes by priority.
        self._waiting: dict[RequestId, tuple[int, Request]] = {}  # with their arrival
        self._queue: list[tuple[int, int, RequestId]] = []  # a heap; may hold some that wait no more
        self._arrivals = count()
        self._jobs: dict[RequestId, Job] = {}  # those that were sent, and whose last segment has not come
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready: asyncio.Queue[tuple[Segment, ...] | None] = asyncio.Queue()  # None: no more will come
        self._still = asyncio.Event()
        self._still.set()
        self._asleep = self._paused = self._draining = self._closed = False
        self._lost: EngineLost | None = None
        self._ticking: asyncio.Task[None] | None = None
        self.spans = SpanLog()
        self._totals = Totals(slots, self.spans)

    @property
    def id(self) -> str:
        return self._id

    @property
    def slots(self) -> int:
        return self._totals.slots

    @property
    def version(self) -> WeightVersion | None:
        """None before the first load, whatever the server says it has: only what was loaded here is known."""
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        """Once started, also of this server: it hears seeds or not, and gives memory back or not."""
        able = CAPABILITIES["sglang"]
        return able if self._about is None else replace(able, sleep=self._about.sleep, noise=self._about.seeds)

    async def start(self) -> None:
        """Wait for the server, and see that it suits. Raises ConfigError, EngineError, or TimeLimitExceeded."""
        self._check_alive()
        if self._ticking is not None:
            raise EngineError(f"engine {self._id} was started already")
        self._about = about = await self._control.start(self._window, self.slots)
        self._window, self._totals.slots = about.window, about.slots
        self._totals.server = f"sglang {about.version}".rstrip()
        self._ticking = asyncio.create_task(self._tick(), name=f"engine {self._id}")

    def generate(self, requests: Sequence[Request]) -> None:
        """Queue requests; all of them or none. Raises EngineError, and RequestRejected for one that can never run."""
        self._check_alive()
        admission.check(
            self._id,
            requests,
            self._jobs.keys() | self._waiting.keys(),
            started=self._about is not None,
            acknowledged=self._version is not None,
            asleep=self._asleep,
            paused=self._paused,
            draining=self._draining,
        )
        for request in requests:
            admission.check_possible(request, self._window, self._architecture.vocab_size)
        for request in requests:
            arrival = next(self._arrivals)
            self._waiting[request.id] = arrival, request
            heappush(self._queue, (request.priority, arrival, request.id))
        self._note_work()

    async def segments(self) -> AsyncIterator[tuple[Segment, ...]]:
        """What was written, as it comes. Raises EngineLost once the server is gone."""
        while (segments := await self._ready.get()) is not None:
            yield segments
        if not self._closed:
            self._check_alive()

    async def abort(self, requests: Sequence[RequestId]) -> None:
        """Cut these requests. What they wrote comes out of `segments`."""
        self._check_alive()
        self._drop(requests)
        await self._cut([self._jobs[name] for name in requests if name in self._jobs])
        self._check_alive()

    async def pause(self, rollover: Rollover) -> None:
        """Stop at a token boundary; under DRAIN once every request has ended, which may take `drain_s`."""
        self._check_alive()
        with self.spans.doing(Activity.SYNC, "pause"):
            await self._pause(rollover)
        self._check_alive()

    async def _pause(self, rollover: Rollover) -> None:
        if rollover is Rollover.DRAIN:
            await self._drain()
        elif rollover is Rollover.ABORT:
            self._paused = True
            self._drop(list(self._waiting))
            with self._watching():
                await self._control.stop()
            await self._cut(list(self._jobs.values()), told=True)
        else:
            self._paused = True
            with self._watching():
                await self._control.stand(lambda: self._totals.heard_at)
            self._flush()
            self._totals.rest()

    async def prepare(self, manifest: Manifest) -> None:
        """See that the folder is there: all else happens when it is loaded. Raises WeightSyncError."""
        self._check_alive()
        with self.spans.doing(Activity.SYNC, "prepare"):
            await self._control.check_folder(manifest)
        self._prepared = manifest

    async def load(self, version: WeightVersion) -> None:
        """Switch to `version`. Raises WeightSyncError with the version unchanged, EngineError while it generates."""
        self._check_alive()
        if not self._still.is_set() and not self._paused:
            raise EngineError(f"engine {self._id} cannot change weights while it generates: pause it first")
        if self._prepared is None or self._prepared.version != version:
            raise WeightSyncError(f"engine {self._id} was not prepared for version {tuple(version)}")
        with self._watching(), self.spans.doing(Activity.SYNC, "load"):
            await self._control.load(self._prepared)
        self._version = version
        self._load_count += 1
        self._loads[label_of(version)] = self._load_count, version

    async def resume(self) -> None:
        """Go on after a pause."""
        self._check_alive()
        with self._watching(), self.spans.doing(Activity.SYNC, "resume"):
            await self._control.go_on()
        self._paused = self._draining = False
        if self._jobs:
            self._totals.began()
        self._note_work()

    async def sleep(self) -> None:
        """Give back the memory of the cache, and of the weights if the server keeps a copy. EngineError while requests run."""
        self._check_alive()
        if not self._still.is_set():
            raise EngineError(f"engine {self._id} cannot sleep: requests run")
        if self._about is None or not self._about.sleep:
            raise EngineError(f"engine {self._id} cannot sleep: its server was started without --enable-memory-saver")
        with self._watching(), self.spans.doing(Activity.SYNC, "sleep"):
            await self._control.release(weights=self._about.sleep_weights)
        self._asleep = True

    async def wake(self, part: WakePart) -> None:
        """Take the memory again that `sleep` gave back."""
        self._check_alive()
        with self._watching(), self.spans.doing(Activity.SYNC, "wake"):
            await self._control.take_back(part)
        self._asleep = self._asleep and part is not WakePart.CACHE

    def stats(self) -> EngineStats:
        """As far as they can be known from outside."""
        return self._totals.stats()

    def condemn(self, cause: str) -> None:
        """Let go of the server: nothing that it writes from now on counts."""
        self._lose(EngineLost(cause))

    async def close(self) -> None:
        """Cut what runs and leave the server as it was found: going on. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._drop(list(self._waiting))
        for job in list(self._jobs.values()):
            self._end(job, FinishReason.ABORT)
        tasks = [*self._tasks] + ([] if self._ticking is None else [self._ticking])
        for task in tasks:
            task.cancel()
        await attempt(asyncio.gather(*tasks, return_exceptions=True))
        if self._lost is None:
            await attempt(self._control.go_on())
        await attempt(self._client.close())
        self._ready.put_nowait(None)

    # ------------------------------------------------------------------------------------------ one request

    def _send_waiting(self) -> None:
        """Fill the server's slots."""
        while self._queue and len(self._jobs) < self.slots and not self._paused:
            _, arrival, name = heappop(self._queue)
            arrived, request = self._waiting.get(name, (-1, None))
            if request is None or arrived != arrival:
                continue
            if not self._jobs:
                self._totals.began()
            del self._waiting[name]
            job = self._jobs[name] = self._job(request)
            job.task = self._start(self._follow(job))

    def _drop(self, names: Iterable[RequestId]) -> None:
        """What was not sent yet ends without a token."""
        version = self._version
        ended = [name for name in names if self._waiting.pop(name, None) is not None]
        if version is not None:  # else there is none: requests are taken only after a load
            self._deliver([Segment(name, (), (), version, version, FinishReason.ABORT) for name in ended])
        self._note_work()

    def _job(self, request: Request) -> Job:
        version = self._version
        assert version is not None, "requests are taken only after a load"
        watcher = None
        if request.sampling.stop:
            watcher = self._tokenizer.stream(request.sampling.stop)
            watcher.feed(request.written_ids)
        written = Written(request, self._window, self._architecture.eos_ids, watcher, version)
        return Job(written, label_of(version), self._load_count)

    async def _follow(self, job: Job) -> None:
        """Hear one request to its end."""
        assert self._about is not None, "requests are taken only once it was started"
        body = job.body(eos_ids=self._architecture.eos_ids, seeds=self._about.seeds)
        try:
            async with aclosing(self._client.events("/generate", body)) as events:
                async for data in events:
                    news = job.reader.read(data)
                    self._totals.heard(job.request, news, len(self._jobs))
                    self._take(job, news)
                    if job.request.id not in self._jobs:
                        break
                else:
                    raise EngineError("the server said that it is done and not why")
        except EngineLost as error:
            self._lose(error)
            return
        except EngineError as error:
            self._end(job, FinishReason.ERROR, str(error))
            return
        if news.end is None:
            await self._tell(job)

    def _take(self, job: Job, news: News) -> None:
        version = self._version_of(job, news.label) if news.token_ids else None
        segments = job.take(news, version)
        self._deliver(segments)
        if segments and segments[-1].finish is not None:
            del self._jobs[job.request.id]
            self._note_work()

    def _version_of(self, job: Job, label: str | None) -> WeightVersion:
        """Raises EngineLost unless it was loaded here, not before the request was sent."""
        number, version = self._loads.get(label or "", (0, None))
        if version is None or number < job.load:
            last = "nothing" if self._version is None else label_of(self._version)
            raise EngineLost(
                f"the server says that it decodes with weights {label!r}, and {last} was loaded: it was started anew"
            )
        return version

    async def _tell(self, job: Job) -> None:
        """The server need not go on with it. Closing the line says the same, later."""
        with suppress(TimeLimitExceeded, ServerRefused), self._watching():
            await self._control.abort(job.rid)

    async def _cut(self, jobs: Sequence[Job], told: bool = False) -> None:
        """End them with what they wrote. Whoever stands still, or is not done in time, is cut off here."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if self._control.standing else CUT_S):
                while there := [job for job in jobs if self._jobs.get(job.request.id) is job]:
                    if not told:
                        await asyncio.gather(*map(self._tell, there))
                    await asyncio.wait([job.task for job in there if job.task is not None], timeout=AGAIN_S)
        for job in jobs:
            if self._jobs.get(job.request.id) is job and job.task is not None:
                self._end(job, FinishReason.ABORT)
                job.task.cancel()
                if not told:
                    self._start(self._tell(job))

    # ---------------------------------------------------------------------------------------------- the rest

    async def _drain(self) -> None:
        if self._paused and not self._still.is_set():
            raise EngineError(f"engine {self._id} cannot finish what it has while it is paused: resume it first")
        self._draining = True
        try:
            async with asyncio.timeout(self._drain_s):
                await self._still.wait()
        except TimeoutError:
            raise TimeLimitExceeded(f"engine {self._id} did not finish what it has within {self._drain_s:g} s") from None
        self._paused, self._draining = True, False

    async def _tick(self) -> None:
        """Send what waits to be sent."""
        while True:
            await asyncio.sleep(SEGMENT_S)
            self._flush()

    def _flush(self) -> None:
        self._deliver([job.flush() for job in self._jobs.values() if job.written.unsent])

    def _end(self, job: Job, finish: FinishReason, problem: str = "") -> None:
        if self._jobs.pop(job.request.id, None) is job:
            self._deliver([job.flush(finish, problem)])
        self._note_work()

    def _deliver(self, segments: list[Segment]) -> None:
        if segments:
            self._ready.put_nowait(tuple(segments))

    def _note_work(self) -> None:
        """Send what can be sent, and let who waits for the last request go on."""
        if self._lost is None and not self._closed:
            self._send_waiting()
        if not self._jobs:
            self._totals.rest()
        (self._still.clear if self._jobs or self._waiting else self._still.set)()

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"request to engine {self._id}")
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Nothing of a task may fail in silence: what it did not foresee makes the engine unusable."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._lose(error if isinstance(error, EngineLost) else EngineLost(f"{type(error).__name__}: {error}"))

    def _lose(self, error: EngineLost) -> None:
        """The server is gone. What came so far still goes out; its requests end nowhere, and go on elsewhere."""
        if self._lost is not None or self._closed:
            return
        self._lost = error
        self._flush()
        self._jobs.clear()
        self._waiting.clear()
        self._queue.clear()
        self._still.set()
        self._ready.put_nowait(None)
        for task in self._tasks - {asyncio.current_task()}:
            task.cancel()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except EngineLost as error:
            self._lose(error)
            raise

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise EngineLost(f"engine {self._id} is lost: {self._lost}") from self._lost
        if self._closed:
            raise EngineError(f"engine {self._id} is closed")
