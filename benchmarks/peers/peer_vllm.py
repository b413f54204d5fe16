"""vLLM on the CPU: continuous batching, prefix caching, logprobs of sampled tokens as RL needs.

Its engine and its worker are processes of their own, which is the only mode in which it binds threads. They are spawned: each
imports this script again, so nothing may run at its top but what is guarded.
"""

from __future__ import annotations

import os
import time
from typing import Any

from protocol import Channel, serve

CACHE_GIB = 1
SEQUENCES = 64
SPIN_S = 1.5  # its worker spins for a second after its last order


class Vllm:
    def load(self, model: str, dtype: str, threads: int, window: int) -> dict[str, Any]:
        os.environ |= {
            "VLLM_CPU_OMP_THREADS_BIND": _cores(threads),  # left to itself it keeps one core free
            "VLLM_CPU_KVCACHE_SPACE": str(CACHE_GIB),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
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
            self._params(max_tokens=length, ignore_eos=True, temperature=temperature, logprobs=0, detokenize=False)
            for length in lengths
        ]
        started = time.perf_counter()
        answers = self._engine.generate(asked, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        time.sleep(SPIN_S)  # the other side's turn begins when this answers
        return {"seconds": seconds, "ids": [list(answer.outputs[0].token_ids) for answer in answers]}


def _cores(threads: int) -> str:
    """As many cores as threads, of those this process may use. Raises ValueError when there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    if threads > len(cores):
        raise ValueError(f"vLLM binds each thread to a core of its own, and there are {len(cores)} for {threads} threads")
    return ",".join(map(str, cores[:threads]))


if __name__ == "__main__":
    channel = Channel()
    peer = Vllm()
    serve(channel, {"load": peer.load, "generate": peer.generate})
