"""OpenAI-compatible servers as an engine: for judges, teachers and evaluation, never for training."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from rollyard.engine import admission
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.openai.answers import Piece
from rollyard.engine.openai.client import OpenAIClient
from rollyard.engine.openai.failure import ServerError
from rollyard.engine.openai.offer import Offer, ask_offer
from rollyard.engine.written import seed
from rollyard.errors import EngineError, RequestRejected, WeightSyncError
from rollyard.events import Rollover, WakePart
from rollyard.types import Capabilities, EngineStats, FinishReason, Manifest, Request, RequestId, Segment, WeightVersion
from rollyard.watch.spans import Burst, SpanLog, work_for

if TYPE_CHECKING:
    from rollyard.model.tokenizer import StopWatcher, Tokenizer

ONLY = WeightVersion(0)  # the weights of a server never change here
JSON_BITS = 2**53 - 1  # of a seed: what every JSON reader keeps
CLOSE_S = 10.0  # seconds that closing a stream may take
OVERFLOW = re.compile(r"(?:context|model) length\D{0,20}(\d+)")  # the window, in refusals of OpenAI, vLLM and SGLang
FINISHES = {
    "stop": FinishReason.STOP,
    "tool_calls": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    "abort": FinishReason.ABORT,
}


@dataclass(slots=True, eq=False)
class _Job:
    """A request under way."""

    request: Request
    most: int  # tokens it may write
    task: asyncio.Task[None] | None = None
    watcher: StopWatcher | None = None
    written: int = 0  # tokens
    fitted: bool = False  # the server refused it once for its length
    text: list[str] = field(default_factory=list)  # where the server gives no token ids


class OpenAIEngine:
    """Implements `protocols.Engine` over servers whose weights it cannot change: the version is (0, 0) for ever.

    What the servers offer is found out by `start`; `capabilities` says it from then on. All are taken to be alike: one that
    is not ends its requests with ERROR. Token ids are those that were sampled where servers give them (vLLM, SGLang). Where
    they do not, the text is tokenised anew once it is whole, and `capabilities.token_ids` is False. A logprob that is not
    the one of the distribution its token was drawn from is NaN.

    Args:
        id: its name.
        client: the servers; closed with the engine.
        tokenizer: of the model. Without it stop strings that begin in `written_ids` are not seen, and servers have to give
            token ids.
        window: tokens of prompt and completion at most, where the servers do not say.
    """

    def __init__(self, id: str, client: OpenAIClient, tokenizer: Tokenizer | None = None, window: int | None = None) -> None:
        self._id, self._client, self._tokenizer, self._window = id, client, tokenizer, window
        self._offer: Offer | None = None
        self._jobs: dict[RequestId, _Job] = {}
        self._ready: asyncio.Queue[tuple[Segment, ...] | None] = asyncio.Queue()  # None: no more will come
        self._still = asyncio.Event()
        self._still.set()
        self._paused = self._draining = self._closed = False
        self.spans = SpanLog()
        self._burst = Burst(self.spans)
        self._generated = 0

    @property
    def id(self) -> str:
        return self._id

    @property
    def slots(self) -> int:
        return self._client.slots

    @property
    def version(self) -> WeightVersion:
        return ONLY

    @property
    def capabilities(self) -> Capabilities:
        """Before the start: the least that any server can do."""
        least, offer = CAPABILITIES["openai"], self._offer
        if offer is None:
            return least
        return replace(least, logprobs=offer.tempered, truncation=offer.processed, token_ids=offer.token_ids)

    async def start(self) -> None:
        """Find out what the servers offer. Raises ServerError, and EngineError when that is not enough."""
        self._check_open()
        if self._offer is not None:
            raise EngineError(f"engine {self._id} was started already")
        offer = await ask_offer(self._client)
        if not offer.token_ids and self._tokenizer is None:
            problem = "its servers give no token ids, and there is no tokenizer to make them of the text"
            raise EngineError(f"engine {self._id} cannot serve: {problem}")
        self._window = self._window or offer.window
        self._offer = offer

    def generate(self, requests: Sequence[Request]) -> None:
        """Ask for all of them at once. Raises EngineError, and RequestRejected for one that can never run."""
        self._check_open()
        admission.check(
            self._id,
            requests,
            self._jobs,
            started=self._offer is not None,
            paused=self._paused,
            draining=self._draining,
        )
        for job in [self._job(request) for request in requests]:
            self._jobs[job.request.id] = job
            job.task = asyncio.create_task(self._serve(job), name=f"request {tuple(job.request.id)}")
            job.task.add_done_callback(partial(self._on_done, job))
        self._note_work()

    async def segments(self) -> AsyncIterator[tuple[Segment, ...]]:
        """What was written, as it comes: an engine of servers is never lost, its requests fail one by one."""
        while (segments := await self._ready.get()) is not None:
            yield segments

    async def abort(self, requests: Sequence[RequestId]) -> None:
        """Cut these requests: their streams are closed, and servers stop. What had come is kept."""
        self._check_open()
        await self._cut([self._jobs[name] for name in requests if name in self._jobs])

    async def pause(self, rollover: Rollover) -> None:
        """Returns when nothing runs. Raises EngineError for KEEP: no server can be made to stand still."""
        self._check_open()
        if rollover is Rollover.KEEP:
            raise EngineError(f"engine {self._id} cannot keep requests while it is paused: its servers are not ours")
        if rollover is Rollover.DRAIN:
            self._draining = True
            await self._still.wait()
            self._check_open()
        else:
            await self._cut(list(self._jobs.values()))
        self._paused, self._draining = True, False

    async def resume(self) -> None:
        """Go on after a pause."""
        self._check_open()
        self._paused = self._draining = False

    async def prepare(self, manifest: Manifest) -> None:
        raise self._fixed()

    async def load(self, version: WeightVersion) -> None:
        raise self._fixed()

    async def sleep(self) -> None:
        raise EngineError(f"engine {self._id} cannot sleep: its servers are not ours")

    async def wake(self, part: WakePart) -> None:
        """It never sleeps."""

    def stats(self) -> EngineStats:
        return EngineStats(generated_tokens=self._generated, slots=self.slots)

    def condemn(self, cause: str) -> None:
        """Raises EngineError: it has several servers, and is no part of a run."""
        raise EngineError(f"engine {self._id} is several servers and cannot be taken out: {cause}")

    async def close(self) -> None:
        """Cut what runs, end `segments`, close all connections. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        await self._cut(list(self._jobs.values()))
        self._ready.put_nowait(None)
        await self._client.close()

    def _job(self, request: Request) -> _Job:
        """Raises RequestRejected."""
        assert self._offer is not None, "started"
        name, sampling = tuple(request.id), request.sampling
        length = len(request.prompt_ids) + len(request.written_ids)
        room = sampling.max_tokens if self._window is None else self._window - length
        if min(room, sampling.max_tokens, length) < 1:
            raise RequestRejected(f"request {name} can never run: no room for a token, or no prompt")
        if not self._offer.extended and (sampling.top_k or sampling.ignore_eos):
            raise RequestRejected(f"request {name} can never run: the servers of {self._id} know no top_k and no ignore_eos")
        job = _Job(request, min(room, sampling.max_tokens))
        if sampling.stop and self._tokenizer is not None:
            job.watcher = self._tokenizer.stream(sampling.stop)
            job.watcher.feed(request.written_ids)
        return job

    async def _serve(self, job: _Job) -> None:
        """One request. Whatever a server does, it ends with one segment that finishes."""
        try:
            finish, problem = await self._stream(job)
        except ServerError as error:
            if not error.overflow:
                finish, problem = FinishReason.ERROR, str(error)
            elif self._fit(job, error.message):
                await self._serve(job)
                return
            else:
                finish, problem = FinishReason.CONTEXT, ""
        self._end(job, finish, problem)

    async def _stream(self, job: _Job) -> tuple[FinishReason, str]:
        """Why it ended, and what went wrong. Raises ServerError."""
        assert self._offer is not None, "started"
        request = job.request
        stream = self._client.stream(
            (*request.prompt_ids, *request.written_ids),
            replace(request.sampling, max_tokens=job.most),
            logprobs=1 if self._offer.logprobs else None,
            seed=seed(request) & JSON_BITS,
            priority=request.priority,
            extra={"return_token_ids": True, "top_k": request.sampling.top_k or -1} if self._offer.extended else {},
        )
        word = None
        async with stream as pieces:
            async for piece in pieces:
                if problem := self._problem(job, piece):
                    return FinishReason.ERROR, problem
                if self._take(job, piece):
                    return FinishReason.STOP, ""
                word = piece.finish or word
        if word is None:  # as vLLM ends a request that is cut before its first token
            return FinishReason.ABORT, ""
        if word == "length" and (job.written if self._offer.token_ids else job.most) < request.sampling.max_tokens:
            return FinishReason.CONTEXT, ""  # cut to the window here, or by the server
        finish = FINISHES.get(word, FinishReason.ERROR)
        return finish, f"the server ended it with {word!r}" if finish is FinishReason.ERROR else ""

    def _problem(self, job: _Job, piece: Piece) -> str:
        """What is wrong with what came; empty when nothing is."""
        assert self._offer is not None, "started"
        if not self._offer.token_ids:
            return ""
        if piece.token_ids is None:
            return "a server gave text without token ids" if piece.text else ""
        if job.written + len(piece.token_ids) > job.most:
            return f"a server wrote more than the {job.most} tokens it was asked for"
        if self._offer.logprobs and piece.logprobs is None and piece.token_ids:
            return "a server gave token ids without logprobs"
        return ""

    def _take(self, job: _Job, piece: Piece) -> bool:
        """Pass on what came. True when a stop string is complete: nothing after it belongs to the completion."""
        assert self._offer is not None, "started"
        if not self._offer.token_ids:
            job.text.append(piece.text)
            return False
        ids = piece.token_ids or ()
        stop = None
        if job.watcher is not None:
            stop = next((end for end, token_id in enumerate(ids, 1) if job.watcher.push(token_id)), None)
        ids = ids[:stop]
        if ids:
            exact = piece.logprobs is not None and self._offer.exact(job.request.sampling)
            logprobs = (piece.logprobs or ())[: len(ids)] if exact else (math.nan,) * len(ids)
            job.written += len(ids)
            self._deliver(Segment(job.request.id, ids, logprobs, ONLY, ONLY))
        return stop is not None

    def _fit(self, job: _Job, message: str) -> bool:
        """Learn the window from a server's refusal. False when there is no room in it, or the server does not say."""
        found = OVERFLOW.search(message)
        if found is None or job.fitted:
            return False
        self._window, job.fitted = int(found[1]), True
        room = self._window - len(job.request.prompt_ids) - len(job.request.written_ids)
        fits, job.most = 0 < room < job.most, room
        return fits

    async def _cut(self, jobs: Sequence[_Job]) -> None:
        tasks = [job.task for job in jobs if job.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        for job in jobs:
            self._end(job, FinishReason.ABORT)

    def _end(self, job: _Job, finish: FinishReason, problem: str = "") -> None:
        """Its last segment, unless that was sent."""
        if self._jobs.get(job.request.id) is not job:
            return
        del self._jobs[job.request.id]
        ids: tuple[int, ...] = ()
        if job.text and self._tokenizer is not None:
            ids = self._tokenizer.encode("".join(job.text), special=False)
        self._deliver(Segment(job.request.id, ids, (math.nan,) * len(ids), ONLY, ONLY, finish, problem))
        self._note_work()

    def _deliver(self, segment: Segment) -> None:
        self._generated += len(segment.token_ids)
        self._burst.tick(*work_for(segment.request.group))
        self._ready.put_nowait((segment,))

    def _note_work(self) -> None:
        if self._jobs:
            self._burst.go()
            self._still.clear()
        else:
            self._burst.rest()
            self._still.set()

    def _on_done(self, job: _Job, task: asyncio.Task[None]) -> None:
        """What nobody foresaw ends the request too."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(job, FinishReason.ERROR, f"{type(error).__name__}: {error}")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError(f"engine {self._id} is closed")

    def _fixed(self) -> WeightSyncError:
        return WeightSyncError(f"engine {self._id} takes no weights: those of its servers are not ours")
