"""vLLM's engine in this process, on the CPU: continuous batching, prefix caching, logprobs of sampled tokens as RL needs."""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import Channel, serve

CACHE_GIB = 1
SEQUENCES = 64


class Vllm:
    def load(self, model: str, dtype: str, threads: int, window: int) -> dict[str, Any]:
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",  # left to itself it keeps one core free
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        import torch
        import vllm

        self._params = vllm.SamplingParams
        self._engine = vllm.LLM(
            model,
            dtype=dtype,
            enforce_eager=True,
            max_model_len=window,
            max_num_seqs=SEQUENCES,
            enable_prefix_caching=True,
            disable_log_stats=True,
        )
        return {"versions": {"vllm": vllm.__version__, "torch": torch.__version__}}

    def generate(self, prompts: list[list[int]], lengths: list[int], temperature: float, batch: int, seed: int) -> dict[str, Any]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = [
            self._params(max_tokens=length, min_tokens=length, ignore_eos=True, temperature=temperature, logprobs=0)
            for length in lengths
        ]
        started = time.perf_counter()
        answers = self._engine.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        return {"seconds": seconds, "ids": [list(answer.outputs[0].token_ids) for answer in answers]}


if __name__ == "__main__":
    channel = Channel()
    peer = Vllm()
    serve(channel, {"load": peer.load, "generate": peer.generate})
