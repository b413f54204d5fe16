"""vLLM's async engine: token ids in, token ids and logprobs out. It runs in a process that Rollyard owns.

Written against vLLM 0.32; the one module on this side that knows its insides. On the other side, within vLLM's own worker,
that is `worker`.

    VllmEngine ── AsyncLLM ──(vLLM's line)── EngineCore, its worker, and there worker.Transfer with a Receiver

vLLM computes; what a completion is stays Rollyard's: stop strings are found on token ids as the embedded engine finds them,
and so are the finish reasons. Every request's cache is salted with the count of loads, so no key or value of older weights
is ever shared with a request that came after them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollyard.config import EngineConfig
from rollyard.engine import wire
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.vllm.arguments import COOLEST, HOTTEST, arguments
from rollyard.engine.written import Tally, Written, seed
from rollyard.errors import EngineError, EngineLost, RequestRejected, TimeLimitExceeded, WeightSyncError
from rollyard.events import Rollover, WakePart
from rollyard.model.architecture import Architecture
from rollyard.model.tokenizer import Tokenizer
from rollyard.types import Capabilities, EngineStats, FinishReason, Manifest, Request, RequestId, Segment, WeightVersion

SEGMENT_TOKENS = 16
POLL_S = 0.01  # seconds between two looks at weights that are on their way
ALIVE_S = 0.5  # seconds between two looks at vLLM's core while nothing runs
SETTLE_S = 30.0  # seconds that tokens may take from vLLM's front end to here


class VllmEngine:
    """Implements `protocols.Engine` with `AsyncLLM`.

    It starts with the weights of the folder and acknowledges none of them. With random ones it would start no sooner, and a
    packed copy that a load leaves behind would pass for noise in the canary.

    Args:
        id: its name.
        folder: of the model: its configuration and tokenizer are used.
        architecture: of that model.
        config: slots, tokens of a step, further arguments of vLLM.
        dtype: of weights and cache, such as "float32".
        window: tokens of prompt and completion at most.
        engines: how many of them share this machine's memory.
        receiver: `module:function` that makes the receiver inside vLLM's worker, from `order` and a torch device.
        order: what that function needs.
    """

    def __init__(
        self,
        id: str,
        folder: Path,
        architecture: Architecture,
        config: EngineConfig,
        *,
        dtype: str,
        window: int,
        engines: int,
        receiver: str,
        order: str,
    ) -> None:
        self._id, self._folder, self._architecture, self._config = id, folder, architecture, config
        self._dtype, self._window, self._engines = dtype, window, engines
        self._receiver, self._order = receiver, order
        self._llm: Any = None
        self._tokenizer: Tokenizer | None = None
        self._version: WeightVersion | None = None
        self._loads = self._prepares = 0
        self._open: dict[RequestId, asyncio.Task[None]] = {}
        self._written: dict[RequestId, Written] = {}
        self._due: list[Segment] = []
        self._sending = False
        self._ready: asyncio.Queue[tuple[Segment, ...] | None] = asyncio.Queue()  # None: no more will come
        self._turn = asyncio.Lock()
        self._still = asyncio.Event()
        self._still.set()
        self._watching: asyncio.Task[None] | None = None
        self._paused = self._draining = self._closed = False
        self._lost = ""
        self._tally = Tally(config.slots)

    @property
    def id(self) -> str:
        return self._id

    @property
    def slots(self) -> int:
        return self._config.slots

    @property
    def version(self) -> WeightVersion | None:
        return self._version

    @property
    def capabilities(self) -> Capabilities:
        return CAPABILITIES["vllm"]

    async def start(self) -> None:
        """Start vLLM's core and wait until it serves. Raises EngineError; why it failed stands in what it printed."""
        self._check_alive()
        if self._llm is not None:
            raise EngineError(f"engine {self._id} was started already")
        self._llm = await asyncio.to_thread(self._build)
        await self._llm.get_supported_tasks()  # asked once; from now on a request is handed over without waiting
        await self._hand_over_receiver()
        await self._warm_up()
        self._watching = asyncio.create_task(self._watch(), name=f"engine {self._id}")

    def generate(self, requests: Sequence[Request]) -> None:
        """Queue requests; all of them or none. Raises EngineError, and RequestRejected for one that can never run."""
        self._check_alive()
        if state := self._why_not():
            raise EngineError(f"engine {self._id} takes no requests: it {state}")
        names = [request.id for request in requests]
        if len(set(names)) < len(names) or not self._open.keys().isdisjoint(names):
            raise RequestRejected(f"engine {self._id} has a request of the same id already")
        for request in requests:
            self._check(request)
        if requests and not self._open:
            self._still.clear()
            self._tally.began()
        for request in requests:
            self._begin(request)

    async def segments(self) -> AsyncIterator[tuple[Segment, ...]]:
        """What was written, as it is written. Raises EngineLost when vLLM's core is gone."""
        while (segments := await self._ready.get()) is not None:
            yield segments
        if not self._closed:
            self._check_alive()

    async def abort(self, requests: Sequence[RequestId]) -> None:
        """Cut these requests. What they wrote comes out of `segments`."""
        async with self._turn:
            self._check_alive()
            await self._cut([name for name in requests if name in self._open])

    async def pause(self, rollover: Rollover) -> None:
        """Stop at a token boundary; under DRAIN once every request has ended. Raises EngineError if they stand still."""
        self._check_alive()
        if rollover is Rollover.DRAIN:
            if self._paused and self._open:
                raise EngineError(f"engine {self._id} cannot finish what it has while it is paused: resume it first")
            self._draining = True
            await self._still.wait()
        async with self._turn:
            self._check_alive()
            self._paused, self._draining = True, False
            if rollover is Rollover.ABORT:
                await self._cut(list(self._open))
            await self._stand_still()
            self._send()

    async def prepare(self, manifest: Manifest) -> None:
        """Have the tensors brought near by a thread of vLLM's worker. Raises WeightSyncError; nothing has changed then."""
        self._check_alive()
        self._prepares += 1
        number = self._prepares
        await self._worker("rollyard_prepare", number, wire.MANIFEST.dump_json(manifest).decode())
        while not all(await self._worker("rollyard_prepared", number)):  # noqa: ASYNC110 (a worker cannot call us)
            await asyncio.sleep(POLL_S)

    async def load(self, version: WeightVersion) -> None:
        """Switch to `version`. Raises WeightSyncError with the version unchanged, EngineError while it generates."""
        async with self._turn:
            self._check_alive()
            if not self._paused and self._open:
                raise EngineError(f"engine {self._id} cannot change weights while it generates: pause it first")
            if not self._paused:
                await self._stand_still()
            try:
                await self._switch(version)
            finally:
                if not self._paused:
                    await self._llm.resume_generation()

    async def resume(self) -> None:
        """Go on after a pause."""
        self._check_alive()
        await self._llm.resume_generation()
        self._paused = self._draining = False
        self._tally.began()

    async def sleep(self) -> None:
        """Raises EngineError: on a CPU vLLM says that it sleeps and gives nothing back."""
        raise EngineError(f"engine {self._id} cannot sleep: it gives no memory back")

    async def wake(self, part: WakePart) -> None:
        """It never sleeps."""

    def stats(self) -> EngineStats:
        return self._tally.stats()

    async def close(self) -> None:
        """Cut what runs, end vLLM's processes. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
        if self._llm is not None:
            try:
                if not self._lost:
                    await self._cut(list(self._open))
            finally:
                await asyncio.to_thread(self._llm.shutdown, timeout=0.0)
        self._send()
        self._ready.put_nowait(None)
        self._still.set()

    # ------------------------------------------------------------------------------------------------- requests

    def _begin(self, request: Request) -> None:
        assert self._tokenizer is not None and self._version is not None, "it was started and loaded"
        watcher = None
        if request.sampling.stop:
            watcher = self._tokenizer.stream(request.sampling.stop)
            watcher.feed(request.written_ids)
        written = Written(request, self._window, self._architecture.eos_ids, watcher, self._version)
        task = asyncio.create_task(self._write(written), name=_name(request.id))
        self._written[request.id], self._open[request.id] = written, task
        task.add_done_callback(self._on_done)

    async def _begin_again(self) -> None:
        """Requests that have written nothing are handed over anew: what vLLM may have computed for them is of older weights."""
        silent = [written.request for written in self._written.values() if not written.tokens]
        tasks = [self._open[request.id] for request in silent]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request in silent:
            self._begin(request)
        await asyncio.sleep(0)  # they have reached vLLM

    async def _write(self, written: Written) -> None:
        """Take one request's tokens from vLLM until it ends."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        request = written.request
        ids = [*request.prompt_ids, *request.written_ids]
        prompt = {"type": "token", "prompt_token_ids": ids, "cache_salt": f"load {self._loads}"}
        stream = self._llm.generate(prompt, self._params(written), _name(request.id), priority=request.priority)
        finish, problem, first = FinishReason.ERROR, "", True
        try:
            async for output in stream:
                if first:
                    self._tally.prompt(len(ids), output.num_cached_tokens or 0)
                    first = False
                if (ended := self._take(written, output.outputs[0])) is not None:
                    finish, problem = ended
                    break
        except EngineDeadError:
            self._lose("vLLM's core ended")
            return
        except (VLLMClientError, EngineGenerateError) as error:
            problem = f"{type(error).__name__}: {error.__cause__ or error}"
        finally:
            await stream.aclose()  # cuts it there too, when it ended here first
        del self._open[request.id], self._written[request.id]
        self._deliver(self._flush(written, finish, problem))
        if not self._open:
            self._still.set()

    def _take(self, written: Written, output: Any) -> tuple[FinishReason, str] | None:
        """Add what vLLM wrote; how the request ended, if it has."""
        for token_id, logprobs in zip(output.token_ids, output.logprobs or (), strict=True):
            finish = written.push(token_id, logprobs[token_id].logprob)
            self._tally.token()
            if finish is not None:
                return finish, ""
        self._deliver(*([self._flush(written)] if written.unsent >= SEGMENT_TOKENS else []))
        if output.finish_reason is None:
            return None
        if output.finish_reason == "abort":
            return FinishReason.ABORT, ""
        return FinishReason.ERROR, f"vLLM ended it: {output.finish_reason} {output.stop_reason or ''}".rstrip()

    def _params(self, written: Written) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = written.request.sampling
        return SamplingParams(
            max_tokens=written.room,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=seed(written.request),
            logprobs=0,  # of the drawn token alone
            ignore_eos=True,  # Rollyard's own set of them is given instead
            stop_token_ids=sorted(written.eos_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    def _flush(self, written: Written, finish: FinishReason | None = None, problem: str = "") -> Segment:
        assert self._version is not None
        return written.flush(self._version, finish, problem)

    def _deliver(self, *segments: Segment) -> None:
        """Send segments together with what else comes in this turn of the event loop."""
        self._due += segments
        if not self._sending:
            self._sending = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._sending = False
        if self._tally.step() or self._paused:
            self._due += [self._flush(written) for written in self._written.values() if written.unsent]
        if self._due:
            self._ready.put_nowait(tuple(self._due))
            self._due = []

    async def _cut(self, names: Sequence[RequestId]) -> None:
        await asyncio.sleep(0)  # those that were just handed over have then reached vLLM
        tasks = [self._open[name] for name in names if name in self._open]
        await self._llm.abort([_name(name) for name in names])
        async with self._settling():
            await asyncio.gather(*tasks)
        self._send()

    async def _stand_still(self) -> None:
        """No step from now on, and all that was written before is here."""
        await asyncio.sleep(0)
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        async with self._settling():
            while not self._settled():  # noqa: ASYNC110 (vLLM has no event for it)
                await asyncio.sleep(0)

    @asynccontextmanager
    async def _settling(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(SETTLE_S):
                yield
        except TimeoutError:
            raise TimeLimitExceeded(f"engine {self._id}: what vLLM wrote was not here within {SETTLE_S:g} s") from None

    def _settled(self) -> bool:
        """vLLM's answer to a pause may overtake, on this side, tokens that were written before it."""
        processor = self._llm.output_processor
        waiting = any(state.queue.output is not None for state in processor.request_states.values())
        ended = len(processor.request_states) < len(self._open)
        return bool(self._llm.engine_core.outputs_queue.empty()) and not waiting and not ended

    # -------------------------------------------------------------------------------------------------- weights

    async def _hand_over_receiver(self) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"factory": self._receiver, "order": self._order}
        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))

    async def _switch(self, version: WeightVersion) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        copied = await self._worker("rollyard_take", version.step, version.incarnation)
        await self._vllm(self._llm.start_weight_update())
        update = {"step": version.step, "incarnation": version.incarnation}
        await self._vllm(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update)))
        await self._vllm(self._llm.finish_weight_update(f"{version.step}.{version.incarnation}"))
        self._loads += 1
        self._version = version
        self._tally.copied_bytes += sum(copied)
        await self._begin_again()
        if not self._open:  # else vLLM would refuse; the salt alone keeps old pages from new requests
            await self._llm.reset_prefix_cache()

    async def _worker(self, method: str, *args: object) -> list[Any]:
        """Call the extension in every worker; a problem that one of them tells is a WeightSyncError."""
        answers = await self._vllm(self._llm.collective_rpc(method, args=args))
        for answer in answers:
            if isinstance(answer, str):
                raise WeightSyncError(f"engine {self._id}: {answer}")
        return list(answers)

    async def _vllm(self, call: Awaitable[Any]) -> Any:
        """A call that changes weights. vLLM raises bare exceptions for what failed in a worker."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError:
            self._lose("vLLM's core ended")
            raise EngineLost(f"engine {self._id} is lost: {self._lost}") from None
        except Exception as error:
            raise WeightSyncError(f"engine {self._id}: {error}") from error

    # ---------------------------------------------------------------------------------------------------- vLLM

    def _build(self) -> Any:
        """On a thread: it blocks until vLLM's core is ready."""
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._tally.decoder = f"vLLM {vllm.__version__}"
        self._tokenizer = Tokenizer(self._folder)
        given = arguments(self._folder, self._architecture, self._config, self._dtype, self._window, self._engines)
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise EngineError(f"engine {self._id}: vLLM did not start: {error}") from error

    async def _warm_up(self) -> None:
        """The first request for logprobs has vLLM compile a kernel; better now than in the first step of a run."""
        from vllm import SamplingParams

        async def ask(name: str) -> None:
            prompt = {"type": "token", "prompt_token_ids": [0]}
            async for _ in self._llm.generate(prompt, SamplingParams(max_tokens=2, logprobs=0, detokenize=False), name):
                pass

        await ask("warm up alone")
        await asyncio.gather(*(ask(f"warm up {number}") for number in range(min(3, self._config.slots))))
        await self._llm.reset_prefix_cache()

    async def _watch(self) -> None:
        """Nothing asks vLLM while nothing runs, so its end would go unnoticed."""
        while not self._llm.errored:  # noqa: ASYNC110 (vLLM has no event for it)
            await asyncio.sleep(ALIVE_S)
        self._lose("vLLM's core ended")

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

    def _why_not(self) -> str:
        """Why it takes no requests now, empty when it does."""
        states = (
            (self._llm is None, "was not started"),
            (self._version is None, "has acknowledged no weights"),
            (self._paused, "is paused"),
            (self._draining, "is finishing what it has"),
        )
        return next((text for applies, text in states if applies), "")

    def _check(self, request: Request) -> None:
        known, sampling = len(request.prompt_ids) + len(request.written_ids), request.sampling
        ids = (*request.prompt_ids, *request.written_ids)
        problem = ""
        if not request.prompt_ids:
            problem = "it has no prompt"
        elif sampling.max_tokens < 1:
            problem = "it asks for no token"
        elif known >= self._window:
            problem = f"its {known} tokens leave no room in the window of {self._window}"
        elif max(ids) >= self._architecture.vocab_size or min(ids) < 0:
            problem = f"it has token ids outside the vocabulary of {self._architecture.vocab_size}"
        elif sampling.temperature and not COOLEST <= sampling.temperature <= HOTTEST:
            problem = f"vLLM does not draw at a temperature of {sampling.temperature:g}"
        if problem:
            raise RequestRejected(f"request {tuple(request.id)} can never run: {problem}")


def _name(request: RequestId) -> str:
    return f"{request.group}.{request.member}.{request.attempt}"
