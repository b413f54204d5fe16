"""vLLM as an engine: token ids in, token ids and logprobs out, in a process that Rollyard owns or from a server.

vLLM computes; what a completion is stays Rollyard's: stop strings are found on token ids as the embedded engine finds them,
and so are the finish reasons. Every request's cache is salted with the count of loads, so no key or value of older weights
is ever shared with a request that came after them.

Which weights wrote a token is never guessed from when it came. What comes before a load was written by the weights before
it. From the first load under a request on its tokens are held back: vLLM says at its end which weights wrote how many.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from itertools import count
from pathlib import Path

from rollyard.engine import admission, wire
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.closing import attempt
from rollyard.engine.vllm.arguments import COOLEST, HOTTEST
from rollyard.engine.vllm.core import Asked, Core, Output
from rollyard.engine.vllm.job import Ended, Job
from rollyard.engine.written import Tally, Written
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

SEGMENT_TOKENS = 16
POLL_S = 0.01  # seconds between two looks at weights that are on their way
AGAIN_S = 0.5  # vLLM forgets an order about a request that it does not know yet, so the order is repeated
SETTLE_S = 30.0  # seconds that what was cut may take to end


class VllmEngine:
    """Implements `protocols.Engine` with vLLM.

    It starts with the weights of the folder and acknowledges none of them. With random ones it would start no sooner, and a
    packed copy that a load leaves behind would pass for noise in the canary.

    Args:
        id: its name.
        core: vLLM; closed with the engine.
        folder: of the model: its tokenizer is used.
        architecture: of that model.
        slots: sequences at a time, unless vLLM has room for fewer.
        window: tokens of prompt and completion at most.
        receiver: `module:function` that makes the receiver inside vLLM's worker, from `order` and a torch device.
        order: what that function needs.
    """

    def __init__(
        self,
        id: str,
        core: Core,
        folder: Path,
        architecture: Architecture,
        *,
        slots: int,
        window: int,
        receiver: str,
        order: str,
    ) -> None:
        self._id, self._core, self._folder, self._architecture = id, core, folder, architecture
        self._slots, self._window, self._receiver, self._order = slots, window, receiver, order
        self._tokenizer: Tokenizer | None = None
        self._version: WeightVersion | None = None
        self._loads: list[tuple[str, WeightVersion]] = []  # with what vLLM calls the weights: no two are called alike
        self._prepares = 0
        self._names = count()
        self._jobs: dict[RequestId, Job] = {}
        self._due: list[Segment] = []
        self._sending = False
        self._ready: asyncio.Queue[tuple[Segment, ...] | None] = asyncio.Queue()  # None: no more will come
        self._turn = asyncio.Lock()
        self._loading: set[asyncio.Task[None]] = set()
        self._still = asyncio.Event()
        self._still.set()
        self._watching: asyncio.Task[None] | None = None
        self._paused = self._draining = self._closed = False
        self._lost = ""
        self.spans = SpanLog()
        self._tally = Tally(slots, self.spans)

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
        return CAPABILITIES["vllm"]

    async def start(self) -> None:
        """Wait until vLLM serves. Raises EngineError, or ConfigError for a server that does not suit."""
        self._check_alive()
        if self._watching is not None:
            raise EngineError(f"engine {self._id} was started already")
        with self._named():
            self._tokenizer = await asyncio.to_thread(Tokenizer, self._folder)
            self._slots = min(self._slots, await self._core.start(self._receiver, self._order))
            self._tally = Tally(self._slots, self.spans, self._core.name)
            if self._core.ours:  # another server may be half way between two versions, and has done this before
                await self._warm_up()
        self._watching = asyncio.create_task(self._watch(), name=f"engine {self._id}")

    def generate(self, requests: Sequence[Request]) -> None:
        """Queue requests; all of them or none. Raises EngineError, and RequestRejected for one that can never run."""
        self._check_alive()
        admission.check(
            self._id,
            requests,
            self._jobs,
            started=self._watching is not None,
            acknowledged=self._version is not None,
            paused=self._paused,
            draining=self._draining,
        )
        for request in requests:
            self._check(request)
        if requests and not self._jobs:
            self._still.clear()
            self._tally.began()
        for request in requests:
            self._begin(request)

    async def segments(self) -> AsyncIterator[tuple[Segment, ...]]:
        """What was written, as it is written. Raises EngineLost when vLLM is gone."""
        while (segments := await self._ready.get()) is not None:
            yield segments
        if not self._closed:
            self._check_alive()

    async def abort(self, requests: Sequence[RequestId]) -> None:
        """Cut these requests. What they wrote comes out of `segments`."""
        async with self._turn:
            self._check_alive()
            await self._cut([self._jobs[name] for name in requests if name in self._jobs])

    async def pause(self, rollover: Rollover) -> None:
        """Stop at a token boundary; under DRAIN once every request has ended. Raises EngineError if they stand still."""
        with self.spans.doing(Activity.SYNC, "pause"):
            await self._pause(rollover)

    async def _pause(self, rollover: Rollover) -> None:
        self._check_alive()
        if rollover is Rollover.DRAIN:
            if self._paused and self._jobs:
                raise EngineError(f"engine {self._id} cannot finish what it has while it is paused: resume it first")
            self._draining = True
            await self._still.wait()
        async with self._turn:
            self._check_alive()
            self._paused, self._draining = True, False
            if rollover is Rollover.ABORT:
                await self._cut(list(self._jobs.values()))
            await self._stand_still()
            self._send()
            self._tally.rest()

    async def prepare(self, manifest: Manifest) -> None:
        """Have the tensors brought near by a thread of vLLM's worker. Raises WeightSyncError; nothing has changed then."""
        self._check_alive()
        self._prepares += 1
        number = self._prepares
        with self.spans.doing(Activity.SYNC, "prepare"):
            await self._ask("rollyard_prepare", number, wire.MANIFEST.dump_json(manifest).decode())
            while not all(answer["done"] for answer in await self._ask("rollyard_prepared", number)):  # noqa: ASYNC110 (it cannot call us)
                await asyncio.sleep(POLL_S)

    async def load(self, version: WeightVersion) -> None:
        """Switch to `version`. Raises WeightSyncError with the version unchanged, EngineError while it generates.

        Who gives up waiting does not stop it: vLLM, left half way between two versions, would be of no use.
        """
        loading = asyncio.create_task(self._load(version), name=f"engine {self._id} loads")
        self._loading.add(loading)
        loading.add_done_callback(self._loading.discard)
        await asyncio.shield(loading)

    async def _load(self, version: WeightVersion) -> None:
        async with self._turn:
            self._check_alive()
            if not self._paused and self._jobs:
                raise EngineError(f"engine {self._id} cannot change weights while it generates: pause it first")
            if not self._paused:
                await self._stand_still()
            try:
                with self.spans.doing(Activity.SYNC, "load"):
                    await self._switch(version)
            finally:
                if not self._paused and not self._lost:
                    with self._named():
                        await self._core.go_on()

    async def resume(self) -> None:
        """Go on after a pause, and after a load that is under way."""
        async with self._turn:
            self._check_alive()
            with self._named(), self.spans.doing(Activity.SYNC, "resume"):
                await self._core.go_on()
            self._paused = self._draining = False
        if self._jobs:
            self._tally.began()

    async def sleep(self) -> None:
        """Raises EngineError: it is not written, and on a CPU vLLM says that it sleeps and gives nothing back."""
        raise EngineError(f"engine {self._id} cannot sleep: it gives no memory back")

    async def wake(self, part: WakePart) -> None:
        """It never sleeps."""

    def stats(self) -> EngineStats:
        return self._tally.stats()

    def condemn(self, cause: str) -> None:
        """Whoever runs vLLM ends it, or lets go of its server: nothing that it writes from now on counts."""
        self._lose(cause)

    async def close(self) -> None:
        """Cut what runs, end vLLM or let go of its server. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        await attempt(self._end_jobs())
        await attempt(self._core.close(), parts=2)
        tasks = [
            task for task in (self._watching, *self._loading, *(job.task for job in self._jobs.values())) if task is not None
        ]
        for task in tasks:
            task.cancel()
        await attempt(asyncio.gather(*tasks, return_exceptions=True))
        self._send()
        self._ready.put_nowait(None)
        self._still.set()

    async def _end_jobs(self) -> None:
        async with self._turn:
            if self._jobs and not self._lost:
                await self._cut(list(self._jobs.values()))

    # ------------------------------------------------------------------------------------------------- requests

    def _begin(self, request: Request) -> None:
        assert self._tokenizer is not None and self._version is not None, "it was started and loaded"
        watcher = None
        if request.sampling.stop:
            watcher = self._tokenizer.stream(request.sampling.stop)
            watcher.feed(request.written_ids)
        written = Written(request, self._window, self._architecture.eos_ids, watcher, self._version)
        name = f"{request.id.group}.{request.id.member}.{request.id.attempt}.{next(self._names)}"
        job = self._jobs[request.id] = Job(written, name, self._load_number)
        job.task = asyncio.create_task(self._write(job), name=name)
        job.task.add_done_callback(self._on_done)

    async def _begin_again(self) -> None:
        """Requests that have written nothing are handed over anew: what vLLM may have computed for them is of older weights."""
        silent = [job for job in self._jobs.values() if not job.written.tokens]
        tasks = [job.task for job in silent if job.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for job in silent:
            self._begin(job.written.request)
        await asyncio.sleep(0)  # those in this process have reached vLLM

    async def _write(self, job: Job) -> None:
        """Take one request's tokens from vLLM until it ends."""
        written, request = job.written, job.written.request
        ids = (*request.prompt_ids, *request.written_ids)
        asked = Asked(job.name, ids, job.params(), f"load {self._loads[job.load][0]}", request.priority)
        try:
            ended, labels, cached = await self._hear(job, asked)
            segments = job.last_segments(ended, labels, self._loads[job.load :])
        except EngineLost as error:
            self._lose(str(error))
            return
        if written.tokens:
            self._tally.prompt(request, cached)
        del self._jobs[request.id]
        self._deliver(*segments)
        if not self._jobs:
            self._still.set()
            self._tally.rest()

    async def _hear(self, job: Job, asked: Asked) -> tuple[Ended, Counter[str] | None, int]:
        """How a request ended, which weights vLLM says wrote it, if it does, and the tokens of its prompt that were cached."""
        ended: Ended | None = None
        cached = 0
        try:
            async with aclosing(self._core.generate(asked)) as outputs:
                async for output in outputs:
                    cached = cached or output.cached
                    known = ended is not None
                    ended = ended or self._take(job, output)
                    if ended is not None and (output.finish or not self._held(job)):
                        return ended, output.labels, cached
                    if ended is not None and not known:
                        await self._core.abort([job.name])  # nothing more is wanted but its end, which says what wrote it
        except EngineLost:
            raise
        except (EngineError, TimeLimitExceeded) as error:
            return (FinishReason.ERROR, str(error)), None, cached
        return (FinishReason.ERROR, "vLLM ended it without a word"), None, cached

    def _take(self, job: Job, output: Output) -> Ended | None:
        """Add what vLLM wrote; how the request ended, if it has."""
        written, finish = job.written, None
        for token_id, logprob in zip(output.token_ids, output.logprobs, strict=True):
            finish = written.push(token_id, logprob)
            self._tally.token(written.request)
            if finish is not None:
                return finish, ""
        due = written.unsent >= SEGMENT_TOKENS and not output.finish and not self._held(job)
        self._deliver(*([written.flush(written.started)] if due else []))
        if not output.finish:
            return None
        if output.finish == "abort":
            return FinishReason.ABORT, ""
        return FinishReason.ERROR, f"vLLM ended it: {output.finish} {output.reason}".rstrip()

    def _held(self, job: Job) -> bool:
        """Did weights change under it? What comes may have been written before that, and be late."""
        return job.load != self._load_number

    @property
    def _load_number(self) -> int:
        return len(self._loads) - 1

    def _deliver(self, *segments: Segment) -> None:
        """Send segments together with what else comes in this turn of the event loop."""
        self._due += segments
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._sending = False
        if self._tally.step() or self._paused:
            free = [job.written for job in self._jobs.values() if job.written.unsent and not self._held(job)]
            self._due += [written.flush(written.started) for written in free]
        if self._due:
            self._ready.put_nowait(tuple(self._due))
            self._due = []

    async def _cut(self, jobs: Sequence[Job]) -> None:
        """Have vLLM end them; what it wrote before counts. Raises TimeLimitExceeded when it does not."""
        await asyncio.sleep(0)  # those that were just handed over have then reached vLLM
        left = {job.task: job.name for job in jobs if job.task is not None}
        until = asyncio.get_running_loop().time() + SETTLE_S
        while left and not self._lost:
            with self._named():
                await self._core.abort(list(left.values()))
            done, _ = await asyncio.wait(left, timeout=AGAIN_S)
            for task in done:
                del left[task]
            if left and asyncio.get_running_loop().time() > until:
                raise TimeLimitExceeded(f"engine {self._id}: vLLM did not end what it was told to within {SETTLE_S:g} s")
        self._send()

    async def _stand_still(self) -> None:
        await asyncio.sleep(0)
        with self._named():
            await self._core.stand_still()

    # -------------------------------------------------------------------------------------------------- weights

    async def _switch(self, version: WeightVersion) -> None:
        label = f"{len(self._loads)}.{version.step}.{version.incarnation}"
        taken = await self._ask("rollyard_take", version.step, version.incarnation)
        with self._failing():
            await self._core.update(version, label)
        self._send()  # what came so far was written by the weights before
        self._loads.append((label, version))
        self._version = version
        self._tally.copied_bytes += sum(int(str(answer["bytes"])) for answer in taken)
        await self._begin_again()
        if not self._jobs:  # else vLLM would refuse; the salt alone keeps old pages from new requests
            with self._named():
                await self._core.forget()

    async def _ask(self, method: str, *args: object) -> Sequence[Mapping[str, object]]:
        """Call the extension in every worker; a problem that one of them tells is a WeightSyncError."""
        with self._failing():
            answers = await self._core.ask(method, *args)
        for answer in answers:
            if "problem" in answer:
                raise WeightSyncError(f"engine {self._id}: {answer['problem']}")
        return answers

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A call that changes weights: what vLLM fails in is a WeightSyncError."""
        try:
            with self._named():
                yield
        except EngineLost:
            raise
        except (EngineError, TimeLimitExceeded) as error:
            raise WeightSyncError(str(error)) from error

    @contextmanager
    def _named(self) -> Iterator[None]:
        """A call to vLLM; errors say whose it was."""
        try:
            yield
        except EngineLost as error:
            self._lose(str(error))
            raise EngineLost(f"engine {self._id} is lost: {error}") from None
        except TimeLimitExceeded as error:
            raise TimeLimitExceeded(f"engine {self._id}: {error}") from None
        except EngineError as error:
            raise EngineError(f"engine {self._id}: {error}") from error

    # ---------------------------------------------------------------------------------------------------- vLLM

    async def _warm_up(self) -> None:
        """The first request for logprobs has vLLM compile a kernel; better now than in the first step of a run."""

        async def ask(name: str) -> None:
            params = {"max_tokens": 2, "logprobs": 0, "detokenize": False, "ignore_eos": True}
            async for _ in self._core.generate(Asked(name, (0,), params, "warm up", 0)):
                pass

        await ask("warm up alone")
        await asyncio.gather(*(ask(f"warm up {number}") for number in range(min(3, self._slots))))
        await self._core.forget()

    async def _watch(self) -> None:
        self._lose(await self._core.ended())

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """A request's task ends by itself; an error that was not foreseen ends the engine, so that nobody waits for it."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lose(f"{type(error).__name__}: {error}")

    def _lose(self, cause: str) -> None:
        if not self._lost and not self._closed:
            self._lost = cause
            self._ready.put_nowait(None)
            self._still.set()

    def _check_alive(self) -> None:
        if self._lost:
            raise EngineLost(f"engine {self._id} is lost: {self._lost}")
        if self._closed:
            raise EngineError(f"engine {self._id} is closed")

    def _check(self, request: Request) -> None:
        temperature = request.sampling.temperature
        cold = temperature and not COOLEST <= temperature <= HOTTEST
        problem = f"vLLM does not draw at a temperature of {temperature:g}" if cold else ""
        admission.check_possible(request, self._window, self._architecture.vocab_size, problem)
