"""The embedded engine: an asyncio shell around scheduler and runner.

One task runs engine steps on the device while there is work. Whoever else changes what the steps work with (abort,
pause, load, sleep, close) first takes its turn, so it always finds the engine between two steps, at a token boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from time import perf_counter, process_time, thread_time

from rollyard.config import EngineConfig
from rollyard.engine import admission
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.embedded.output import Output
from rollyard.engine.embedded.pages import PagePool
from rollyard.engine.embedded.runner import Runner
from rollyard.engine.embedded.scheduler import Plan, Scheduler
from rollyard.engine.embedded.scheduler import Sequence as Running
from rollyard.errors import ConfigError, EngineError, EngineLost, WeightSyncError
from rollyard.events import Rollover, WakePart
from rollyard.model.tokenizer import Tokenizer
from rollyard.model.transformer import CausalLM
from rollyard.protocols.devices import Device, Spans
from rollyard.protocols.weights import Receiver
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
from rollyard.watch.paces import Paces
from rollyard.watch.spans import WORK, Burst, work_for

SEGMENT_TOKENS = 16
SEGMENT_S = 0.2


class EmbeddedEngine:
    """Decodes with the parameters of `model`, wherever they are; implements `protocols.Engine`.

    Args:
        id: its name.
        model: the policy. Its stamp is checked before every forward pass.
        tokenizer: finds stop strings.
        device: where all torch work runs.
        receiver: its side of the weight transport.
        config: slots, pages, tokens of a step.
        window: tokens of prompt and completion at most.
        sole: nobody else uses the model: its parameters are given back once packed. In place it is then loaded once only.
        own: its process is its own.

    Raises:
        ConfigError: the window is larger than the model's.
    """

    def __init__(
        self,
        id: str,
        model: CausalLM,
        tokenizer: Tokenizer,
        device: Device,
        receiver: Receiver,
        config: EngineConfig,
        window: int,
        sole: bool = False,
        own: bool = False,
    ) -> None:
        most = model.architecture.window
        if window > most:
            problem = f"a window of {window} tokens is more than the model's {most}"
            raise ConfigError(problem, where="engine.window", remedy=f"at most {most}, or 0 for the model's own")
        self._id, self._model, self._tokenizer, self._device, self._receiver = id, model, tokenizer, device, receiver
        self._slots, self._window, self._sole = config.slots, window, sole
        # A sequence at its longest, and one page more: where it leaves its prompt, that page is copied.
        pages = config.pages or config.slots * (-(-window // config.page_tokens) + 1)
        pool = PagePool(pages, config.page_tokens)
        self._scheduler = Scheduler(
            pool,
            slots=config.slots,
            step_tokens=config.step_tokens,
            prefill_tokens=config.prefill_tokens,
            window=window,
            continuous=config.batching == "continuous",
            share=config.share_prompts,
        )
        self._runner = Runner(model, pool, config, sole)
        self._version: WeightVersion | None = None
        self._outputs: dict[Running, Output] = {}
        self._open: set[RequestId] = set()  # requests whose last segment was not delivered
        self._arrived: list[Request] = []
        self._ready: asyncio.Queue[tuple[Segment, ...] | None] = asyncio.Queue()  # None: no more will come
        self._turn = asyncio.Lock()
        self._work, self._still = asyncio.Event(), asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._asleep = self._paused = self._draining = self._closed = False
        self._lost: BaseException | None = None
        self._flushed_at = perf_counter()
        self._burst, self._paces = Burst(device.spans, (thread_time, process_time) if own else (thread_time,)), Paces()
        self._open_for = dict.fromkeys(WORK, 0)  # how many requests are open
        self._steps = self._prefill_steps = self._generated = self._near_ties = self._copied_bytes = 0
        self._step_s = self._prefill_s = self._plan_s = self._busy_slot_s = 0.0
        self._note_work()

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
        return CAPABILITIES["embedded"]

    @property
    def cache_bytes(self) -> int:
        """Memory that the key-value cache takes now."""
        return self._runner.cache_bytes

    async def start(self) -> None:
        """Take memory for the cache and begin to serve."""
        self._check_alive()
        if self._task is not None:
            raise EngineError(f"engine {self._id} was started already")
        with self.spans.doing(Activity.SETUP):
            await self._device.run(self._runner.allocate)
        self._task = asyncio.create_task(self._serve(), name=f"engine {self._id}")
        self._task.add_done_callback(self._on_done)

    def generate(self, requests: Sequence[Request]) -> None:
        """Queue requests; all of them or none. Raises EngineError, and RequestRejected for one that can never run."""
        self._check_alive()
        admission.check(
            self._id,
            requests,
            self._open,
            started=self._task is not None,
            acknowledged=self._version is not None,
            asleep=self._asleep,
            paused=self._paused,
            draining=self._draining,
        )
        for request in requests:
            vocab_size = self._model.architecture.vocab_size
            admission.check_possible(request, self._window, vocab_size, self._scheduler.lacks(request))
        self._open.update(request.id for request in requests)
        for request in requests:
            self._open_for[work_for(request.id.group)] += 1
        self._arrived.extend(requests)
        self._note_work()

    async def segments(self) -> AsyncIterator[tuple[Segment, ...]]:
        """What was written, as it is written. Raises EngineLost when a step failed."""
        while (segments := await self._ready.get()) is not None:
            yield segments
        if not self._closed:
            self._check_alive()

    async def abort(self, requests: Sequence[RequestId]) -> None:
        """Cut these requests. What they wrote comes out of `segments`."""
        async with self._turn:
            self._check_alive()
            self._submit(self._take_arrived())
            names = set(requests)
            self._cut([output for output in self._outputs.values() if output.sequence.request.id in names])

    async def pause(self, rollover: Rollover) -> None:
        """Stop at a token boundary; under DRAIN once every request has ended. Raises EngineError if they stand still."""
        with self.spans.doing(Activity.SYNC, "pause"):
            await self._pause(rollover)

    async def _pause(self, rollover: Rollover) -> None:
        if rollover is Rollover.DRAIN:
            self._check_alive()
            if self._paused and not self._still.is_set():
                raise EngineError(f"engine {self._id} cannot finish what it has while it is paused: resume it first")
            self._draining = True
            await self._still.wait()
        async with self._turn:
            self._check_alive()
            if rollover is Rollover.ABORT:
                self._submit(self._take_arrived())
                self._cut(self._outputs.values())
            self._paused, self._draining = True, False
            self._deliver(self._flush_all())

    async def prepare(self, manifest: Manifest) -> None:
        """Bring the tensors near, on a thread of its own. Raises WeightSyncError; nothing has changed then."""
        self._check_alive()
        await asyncio.to_thread(self.spans.timed(Activity.SYNC, self._receiver.prepare, "prepare"), manifest)

    async def load(self, version: WeightVersion) -> None:
        """Switch to `version`. Raises WeightSyncError with the version unchanged, EngineError while it generates."""
        async with self._turn:
            self._check_alive()
            if not self._paused and len(self._scheduler) + len(self._arrived):
                raise EngineError(f"engine {self._id} cannot change weights while it generates: pause it first")
            await self._device.run(self.spans.timed(Activity.SYNC, self._take, "load"), version)
            self._version = version
            self._scheduler.switch(version)

    async def resume(self) -> None:
        """Go on after a pause."""
        with self.spans.doing(Activity.SYNC, "resume"):
            self._check_alive()
            self._paused = self._draining = False
            self._note_work()

    async def sleep(self) -> None:
        """Give back the memory of the cache. Raises EngineError while requests run."""
        async with self._turn:
            self._check_alive()
            if len(self._scheduler) + len(self._arrived):
                raise EngineError(f"engine {self._id} cannot sleep: requests run")
            self._scheduler.forget()
            await self._device.run(self.spans.timed(Activity.SYNC, self._runner.release, "sleep"))
            self._asleep = True

    async def wake(self, part: WakePart) -> None:
        """Take memory for the cache again. The weights never left."""
        async with self._turn:
            self._check_alive()
            if part is WakePart.CACHE:
                await self._device.run(self.spans.timed(Activity.SYNC, self._runner.allocate, "wake"))
                self._asleep = False

    def stats(self) -> EngineStats:
        counters = self._scheduler.counters
        return EngineStats(
            steps=self._steps,
            generated_tokens=self._generated,
            prefilled_tokens=counters.prefilled,
            shared_tokens=counters.shared,
            recomputed_tokens=counters.recomputed,
            preemptions=counters.preemptions,
            near_ties=self._near_ties,
            step_s=self._step_s,
            prefill_s=self._prefill_s,
            prefill_steps=self._prefill_steps,
            plan_s=self._plan_s,
            linear_s=self._runner.decoder.linear_s,
            copied_bytes=self._copied_bytes,
            decoder=self._runner.decoder.name,
            busy_slot_s=self._busy_slot_s,
            slots=self._slots,
            paces=self._paces.totals(),
        )

    @property
    def spans(self) -> Spans:
        """Its device's."""
        return self._device.spans

    def condemn(self, cause: str) -> None:
        """Raises EngineError: a thread cannot be ended."""
        raise EngineError(f"engine {self._id} is a part of its run's process and cannot be taken out: {cause}")

    async def close(self) -> None:
        """Cut what runs, end `segments`, free the cache. Closing twice is harmless."""
        async with self._turn:
            if self._closed:
                return
            self._closed = True
            if self._lost is None:
                self._submit(self._take_arrived())
                self._cut(self._outputs.values())
                self._scheduler.forget()
            self._ready.put_nowait(None)
            self._still.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))
        await self._device.run(self._runner.release)
        self._receiver.close()

    async def _serve(self) -> None:
        while True:
            await self._work.wait()
            async with self._turn:
                if self._work.is_set():
                    self._deliver(await self._device.run(self._step, self._take_arrived()))

    def _step(self, arrived: Sequence[Request]) -> list[Segment]:
        """One engine step, on the device's thread: the segments that are due."""
        self._burst.go()
        began = perf_counter()
        self._submit(arrived)
        plan = self._scheduler.plan()
        planned = perf_counter()
        drawn = self._runner.execute(plan)
        executed = perf_counter()
        self._scheduler.commit(plan, drawn.token_ids)
        version = self._scheduler.version
        segments, ended = [], []
        written = 0
        for sequence, token_id, logprob in zip(plan.draws, drawn.token_ids, drawn.logprobs, strict=True):
            if sequence.ended:
                continue
            written += 1
            output = self._outputs[sequence]
            if output.outdated:
                segments.append(output.flush(version))
            finish = output.push(token_id, logprob)
            if finish is not None:
                ended.append(sequence)
                del self._outputs[sequence]
                segments.append(output.flush(version, finish))
            elif output.unsent >= SEGMENT_TOKENS:
                segments.append(output.flush(version))
        self._scheduler.finish(ended)
        now = perf_counter()
        if now - self._flushed_at >= SEGMENT_S:
            segments += self._flush_all()
        self._count(plan, written, drawn.near_ties, now - began)
        self._plan_s += planned - began + now - executed
        return segments

    def _count(self, plan: Plan, written: int, near_ties: int, elapsed: float) -> None:
        """One more step, of `elapsed` seconds."""
        self._steps += 1
        self._generated += written
        self._near_ties += near_ties
        self._step_s += elapsed
        self._busy_slot_s += written * elapsed
        if plan.chunk_tokens:
            self._prefill_steps += 1
            self._prefill_s += elapsed * plan.chunk_tokens / (plan.chunk_tokens + len(plan.decodes))
        work = next((work for work, requests in self._open_for.items() if requests), WORK[0])
        spent = self._burst.tick(*work)
        if self._open_for[WORK[0]] and spent:
            context = sum(sequence.length for sequence in plan.decodes)
            self._paces.add(len(plan.decodes), plan.chunk_tokens, context, *spent)

    def _take(self, version: WeightVersion) -> None:
        """On the device's thread. What arrived becomes the parameters' own memory: nothing is copied here."""
        arrived = self._receiver.take(version)
        if arrived is not None:
            with self._model.stamp.writing():
                for name, parameter in self._model.named_parameters():
                    parameter.data = arrived[name]
        elif self._sole and self._version is not None:
            raise WeightSyncError(f"engine {self._id} gave its parameters back when it was loaded: there is nothing to load")
        self._runner.acknowledge()
        self._copied_bytes += self._runner.decoder.copied_bytes

    def _submit(self, requests: Iterable[Request]) -> None:
        for request in requests:
            sequence = self._scheduler.submit(request)
            watcher = None
            if request.sampling.stop:
                watcher = self._tokenizer.stream(request.sampling.stop)
                watcher.feed(request.written_ids)
            self._outputs[sequence] = Output(sequence, self._window, self._model.architecture.eos_ids, watcher)

    def _take_arrived(self) -> list[Request]:
        arrived, self._arrived = self._arrived, []
        return arrived

    def _cut(self, outputs: Iterable[Output]) -> None:
        cut = list(outputs)
        segments = [output.flush(self._scheduler.version, FinishReason.ABORT) for output in cut]
        self._scheduler.finish([output.sequence for output in cut])
        for output in cut:
            del self._outputs[output.sequence]
        self._deliver(segments)

    def _flush_all(self) -> list[Segment]:
        self._flushed_at = perf_counter()
        version = self._scheduler.version
        return [output.flush(version) for output in self._outputs.values() if output.unsent]

    def _deliver(self, segments: list[Segment]) -> None:
        ended = [segment.request for segment in segments if segment.finish is not None]
        self._open.difference_update(ended)
        for request in ended:
            self._open_for[work_for(request.group)] -= 1
        if segments:
            self._ready.put_nowait(tuple(segments))
        self._note_work()

    def _note_work(self) -> None:
        """Let the serving task run or rest, and who waits for the last request go on."""
        busy = bool(self._arrived) or len(self._scheduler) > 0
        if busy and not self._paused:
            self._work.set()
        else:
            self._work.clear()
            self._burst.rest()
        (self._still.clear if busy else self._still.set)()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """The serving task ended: unless it was cancelled by `close`, a step failed and the engine is lost."""
        if task.cancelled():
            return
        self._lost = task.exception()
        self._ready.put_nowait(None)
        self._still.set()

    def _check_alive(self) -> None:
        if self._lost is not None:
            raise EngineLost(f"engine {self._id} is lost: {type(self._lost).__name__}: {self._lost}") from self._lost
        if self._closed:
            raise EngineError(f"engine {self._id} is closed")
