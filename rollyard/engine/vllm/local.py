"""vLLM's async engine in this process, its core and workers in processes below. Written against vLLM 0.32.

AsyncLLM ──(vLLM's line)── EngineCore, its worker, and there worker.Transfer with a Receiver
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollyard.engine.vllm.core import ADAPTER, ADAPTER_NAME, Asked, Output, labels_of
from rollyard.errors import EngineError, EngineLost, TimeLimitExceeded
from rollyard.types import WeightVersion

ALIVE_S = 0.5  # seconds between two looks at vLLM's core while nothing runs
SETTLE_S = 30.0  # seconds that tokens may take from vLLM's front end to here
ENDED = "vLLM's core ended"
T = TypeVar("T")


class LocalCore:
    """Implements `core.Core` with `AsyncLLM`.

    Args:
        arguments: makes those of `AsyncEngineArgs`, once vLLM can be asked about its platform.
        alpha: of the adapter that requests are computed with; 0 where there is none.
    """

    ours = True

    def __init__(self, arguments: Callable[[], Mapping[str, Any]], alpha: int = 0) -> None:
        self._arguments, self._alpha = arguments, alpha
        self._adapter: Any = None  # from the first load on
        self._llm: Any = None
        self._streams = 0  # requests under way
        self.name = ""

    async def start(self, receiver: str, order: str) -> int:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._llm = await asyncio.to_thread(self._build)
        await self._call(self._llm.get_supported_tasks())  # asked once; from now on a request is handed over without waiting
        info = {"factory": receiver, "order": order, "alpha": self._alpha}
        await self._call(self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info)))
        return int(self._llm.vllm_config.scheduler_config.max_num_seqs)

    async def generate(self, asked: Asked) -> AsyncGenerator[Output]:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        prompt = {"type": "token", "prompt_token_ids": list(asked.token_ids), "cache_salt": asked.salt}
        params = SamplingParams(**asked.params, output_kind=RequestOutputKind.DELTA)
        stream = self._llm.generate(prompt, params, asked.name, lora_request=self._adapter, priority=asked.priority)
        self._streams += 1
        try:
            async for output in stream:
                yield _read(output)
        except EngineDeadError:
            raise EngineLost(ENDED) from None
        except (VLLMClientError, EngineGenerateError) as error:
            raise EngineError(f"{type(error).__name__}: {error.__cause__ or error}") from error
        finally:
            self._streams -= 1
            await stream.aclose()  # cuts it there too, when it ended here first

    async def abort(self, names: Sequence[str]) -> None:
        await self._call(self._llm.abort(list(names)))

    async def stand_still(self) -> None:
        await self._call(self._llm.pause_generation(mode="keep", clear_cache=False))
        try:
            async with asyncio.timeout(SETTLE_S):
                while not self._settled():  # noqa: ASYNC110 (vLLM has no event for it)
                    await asyncio.sleep(0)
        except TimeoutError:
            raise TimeLimitExceeded(f"what vLLM wrote was not here within {SETTLE_S:g} s") from None

    def _settled(self) -> bool:
        """vLLM's answer to a pause may overtake, on this side, tokens that were written before it. Raises EngineLost."""
        if self._llm.errored:
            raise EngineLost(ENDED)
        processor = self._llm.output_processor
        waiting = any(state.queue.output is not None for state in processor.request_states.values())
        ended = len(processor.request_states) < self._streams
        return bool(self._llm.engine_core.outputs_queue.empty()) and not waiting and not ended

    async def go_on(self) -> None:
        await self._call(self._llm.resume_generation())

    async def ask(self, method: str, *args: object) -> Sequence[Mapping[str, object]]:
        return list(await self._call(self._llm.collective_rpc(method, args=args)))

    async def update(self, version: WeightVersion, label: str) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        if self._alpha:
            await self._adapt(label)
            return
        update = {"step": version.step, "incarnation": version.incarnation}
        await self._call(self._llm.start_weight_update())
        await self._call(self._llm.update_weights(WeightTransferUpdateRequest(update_info=update)))
        await self._call(self._llm.finish_weight_update(label))

    async def _adapt(self, label: str) -> None:
        from vllm.lora.request import LoRARequest

        await self.ask("rollyard_adapt")
        await self._call(self._llm.update_weight_version(label))
        self._adapter = LoRARequest(ADAPTER_NAME, ADAPTER, "in memory")  # it is there already: nobody looks for a folder

    async def forget(self) -> None:
        await self._call(self._llm.reset_prefix_cache())

    async def ended(self) -> str:
        """Nothing asks vLLM while nothing runs, so its end would go unnoticed."""
        while not self._llm.errored:  # noqa: ASYNC110 (vLLM has no event for it)
            await asyncio.sleep(ALIVE_S)
        return ENDED

    async def close(self) -> None:
        if self._llm is not None:
            await asyncio.to_thread(self._llm.shutdown, timeout=0.0)

    def _build(self) -> Any:
        """On a thread: it blocks until vLLM's core is ready."""
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.name = f"vLLM {vllm.__version__}"
        given = self._arguments()
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        except (RuntimeError, ValueError, TypeError, OSError) as error:
            raise EngineError(f"vLLM did not start: {error}") from error

    async def _call(self, call: Awaitable[T]) -> T:
        """vLLM raises bare exceptions for what failed in a worker."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await call
        except EngineDeadError:
            raise EngineLost(ENDED) from None
        except Exception as error:
            raise EngineError(str(error)) from error


def _read(output: Any) -> Output:
    done = output.outputs[0]
    logprobs = [of[token_id].logprob for token_id, of in zip(done.token_ids, done.logprobs or (), strict=True)]
    reason = "" if done.stop_reason is None else str(done.stop_reason)
    return Output(
        done.token_ids, logprobs, done.finish_reason or "", reason, output.num_cached_tokens or 0, labels_of(done.weight_versions)
    )
