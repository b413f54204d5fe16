"""How vLLM is started: its engine's arguments and variables, from Rollyard's options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rollyard.config import EngineConfig, LoraConfig
from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture

BLOCK = 128  # tokens of one page of vLLM's cache on the CPU
BYTES = {"float32": 4, "bfloat16": 2}
COOLEST, HOTTEST = 0.01, 2.0  # temperatures vLLM takes as they are; below it would silently use 0.01
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of adapters that vLLM can be told to have room for
# What holds the engine to its contract, and is no matter of taste.
FIXED = frozenset(
    {"model", "logprobs_mode", "worker_extension_cls", "weight_transfer_config", "skip_tokenizer_init", "scheduling_policy"}
    | {"max_model_len", "max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size", "dtype", "gpu_memory_utilization"}
    | {"enable_prefix_caching", "generation_config", "override_generation_config"}
    | {"stream_interval"}  # tokens would be held back in vLLM while weights change
    | {"speculative_config", "spec_method", "spec_model", "spec_tokens"}  # a draft model would keep its weights
    | {"data_parallel_size", "pipeline_parallel_size"}
    | {"enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_dtype", "lora_target_modules", "fully_sharded_loras"}
    | {"host", "port", "uds", "api_key"}  # of its server
)


def check(config: EngineConfig, temperature: float, window: int = 0, *, cpu: bool = False, rank: int = 0) -> None:
    """Raises ConfigError for what vLLM, driven this way, does not do.

    Args:
        window: tokens of prompt and completion at most.
        rank: of the adapter, if there is one.
    """
    problem, where, remedy = "", "", ""
    if fixed := FIXED & extra(config).keys():
        problem, where, remedy = f"{min(fixed)} is not free", "engine.extra", "use the option of Rollyard for it, or leave it out"
    elif rank > RANKS[-1]:
        problem, where, remedy = f"vLLM has no room for a rank of {rank}", "lora.rank", f"use at most {RANKS[-1]}"
    elif cpu and not config.url and config.step_tokens < window:
        problem = f"on a CPU vLLM takes a prompt in one step of {config.step_tokens} tokens, and one may have {window}"
        where, remedy = "engine.step_tokens", f"use at least {window}, or a smaller engine.window"
    elif temperature and not COOLEST <= temperature <= HOTTEST:
        problem, where = f"vLLM does not draw at a temperature of {temperature:g}", "rollout.temperature"
        remedy = f"use {COOLEST:g} to {HOTTEST:g}"
    if problem:
        raise ConfigError(problem, where=where, remedy=remedy)


def extra(config: EngineConfig) -> dict[str, Any]:
    """Further arguments. vLLM takes names with dashes and with underscores; here they have the latter."""
    given: dict[str, Any] = json.loads(config.extra or "{}")
    return {name.lstrip("-").replace("-", "_"): value for name, value in given.items()}


def environment(config: EngineConfig, threads: int, *, cpu: bool = False) -> dict[str, str]:
    """Variables for the engine's process; vLLM reads them in each of its own.

    Args:
        threads: on the CPU.
        cpu: nothing runs on a GPU, for certain. Unless `engine.extra` says otherwise the model is not compiled there, and
            compiling the one kernel that is left (ranks of logprobs, which nobody reads) would take a fifth of the start.
    """
    eager = {"TORCHDYNAMO_DISABLE": "1"} if cpu and "enforce_eager" not in extra(config) else {}
    return eager | {
        "ROLLYARD_OWNED": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # With one device the worker lives in the core's process: one process less to start, one hop less in every step.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if config.tensor_parallel_size == 1 else "1",
        # All tokens of a step come through at once: `LocalCore._settled` relies on it.
        "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": str(2**30),
        "OMP_NUM_THREADS": str(threads),
    }


def defaults(config: EngineConfig) -> dict[str, str]:
    """Variables that a user may set otherwise. On a CPU vLLM wants a NUMA node for each worker, unless it binds no threads."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if config.tensor_parallel_size > 1 else {}


def arguments(
    folder: Path,
    architecture: Architecture,
    config: EngineConfig,
    dtype: str,
    window: int,
    engines: int,
    lora: LoraConfig | None = None,
) -> dict[str, Any]:
    """For `AsyncEngineArgs`; what is in `engine.extra` comes last. Called where vLLM is.

    Raises ConfigError for a name there that vLLM's engine does not know: its server would take it for another argument.

    Args:
        dtype: of weights and cache.
        window: tokens of prompt and completion at most.
        engines: how many of them share this machine's memory.
        lora: of the adapter that requests are computed with.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    further = extra(config)
    if unknown := further.keys() - AsyncEngineArgs.__dataclass_fields__.keys():
        problem = f"vLLM's engine has no argument {min(unknown)}"
        raise ConfigError(problem, where="engine.extra", remedy="see vllm.EngineArgs for their names")
    chosen: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "generation_config": "vllm",
        "max_model_len": window,
        "max_num_seqs": config.slots,
        "max_num_batched_tokens": config.step_tokens,
        "tensor_parallel_size": config.tensor_parallel_size,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_prefix_caching": config.share_prompts,
        "logprobs_mode": "processed_logprobs",
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "worker_extension_cls": "rollyard.engine.vllm.worker.WorkerExtension",
        "weight_transfer_config": {"backend": "rollyard"},
    }
    if lora is not None:
        rank = next(most for most in RANKS if most >= lora.rank)
        chosen |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": list(lora.modules)}
    if current_platform.is_cpu():
        size = _cache_bytes(architecture, config, dtype, window, engines)
        chosen |= {"enforce_eager": True, "kv_cache_memory_bytes": size}  # vLLM compiles and warms up nothing then
        # A prompt that is cut into several steps turns back the request's generator, which a CPU's cannot: vLLM 0.32 dies.
        chosen |= {"enable_chunked_prefill": False}
    return chosen | further


def _cache_bytes(shape: Architecture, config: EngineConfig, dtype: str, window: int, engines: int) -> int:
    """Of one worker: enough for every slot at its longest, or for `engine.pages`; together half of the free memory at most."""
    import psutil

    workers = config.tensor_parallel_size
    token = 2 * shape.layers * max(shape.kv_heads // workers, 1) * shape.head_dim * BYTES[dtype]
    longest = (-(-window // BLOCK) + 1) * BLOCK
    wanted = config.pages * config.page_tokens or config.slots * longest
    free = int(psutil.virtual_memory().available) // 2 // (engines * workers)
    return min(max(wanted, longest) * token, free)
