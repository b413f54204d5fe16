"""AReaL's `WorkflowExecutor` with an engine and a workflow that answer at once: what its orchestration costs.

Its own threads, event loop, capacity and trajectories; no server, no trainer, no reward but zeros.
"""

from __future__ import annotations

import asyncio
import logging
import time
from importlib import metadata
from typing import Any

from protocol import Channel, serve

WITHOUT_LIMIT = 10**6  # versions that a trajectory may lag behind: nothing waits for a trainer
LIMIT_S = 600.0


class Engine:
    """What the executor and the workflow ask of an inference engine."""

    def __init__(self, tokens: int) -> None:
        self._ids, self._logprobs = [1] * tokens, [-0.5] * tokens

    def get_version(self) -> int:
        return 0

    async def agenerate(self) -> tuple[list[int], list[float]]:
        return self._ids, self._logprobs


class Areal:
    def load(self) -> dict[str, Any]:
        import torch

        torch.set_num_threads(1)
        import areal.api
        import areal.api.cli_args
        import areal.infra.workflow_executor as infra

        self._torch, self._api, self._infra = torch, areal.api, infra
        self._config = areal.api.cli_args.InferenceEngineConfig
        self._log = logging.getLogger("areal-bench")
        self._log.setLevel(logging.ERROR)
        return {"versions": {"areal": metadata.version("areal"), "torch": torch.__version__}}

    def run(self, episodes: int, size: int, prompt: int, tokens: int, concurrent: int) -> dict[str, Any]:
        """So many episodes of `size` completions, submitted at once."""
        engine, workflow = Engine(tokens), self._workflow(size, prompt)
        config = self._config(
            experiment_name="bench",
            trial_name="bench",
            backend="sglang:d1",
            tokenizer_path="",
            max_concurrent_rollouts=concurrent,
            consumer_batch_size=episodes,
            max_head_offpolicyness=WITHOUT_LIMIT,
            queue_size=2 * episodes,
        )
        executor = self._infra.WorkflowExecutor(config=config, inference_engine=engine)
        executor.initialize(logger=self._log)
        try:
            began, cpu = time.perf_counter(), time.process_time()
            for number in range(episodes):
                executor.submit({"row": number}, workflow=workflow)
            found = executor.wait(count=episodes, timeout=LIMIT_S)
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        finally:
            executor.destroy()
        return {"seconds": seconds, "cpu_s": cpu_s, "completions": sum(len(each["rewards"]) for each in found)}

    def _workflow(self, size: int, prompt: int) -> Any:
        torch = self._torch

        class Instant(self._api.RolloutWorkflow):  # type: ignore[misc, name-defined]
            """One episode: so many answers to one prompt, as the tensors that AReaL's own workflows return."""

            async def arun_episode(self, engine: Engine, data: dict[str, Any]) -> dict[str, Any]:
                answers = await asyncio.gather(*(engine.agenerate() for _ in range(size)))
                length = prompt + len(answers[0][0])
                mask = [0] * prompt + [1] * (length - prompt)
                return {
                    "input_ids": torch.tensor([[1] * prompt + ids for ids, _ in answers]),
                    "attention_mask": torch.ones(size, length, dtype=torch.bool),
                    "loss_mask": torch.tensor([mask] * size),
                    "logprobs": torch.tensor([[0.0] * prompt + logprobs for _, logprobs in answers]),
                    "versions": torch.zeros(size, length, dtype=torch.int),
                    "rewards": torch.zeros(size),
                }

        return Instant()


if __name__ == "__main__":
    channel = Channel()
    peer = Areal()
    serve(channel, {"load": peer.load, "run": peer.run})
