"""Which engines heed which options: one that would be ignored is refused."""

from __future__ import annotations

from collections.abc import Mapping

from rollyard.config import Config, EngineConfig
from rollyard.errors import ConfigError

HERE = "an embedded engine in the run's process"
CHILD = "an embedded engine in a process of its own"
VLLM = "vLLM that is started with the run"
RUNNING = "a vLLM server that runs already"
SGLANG = "SGLang"

OURS = (HERE, CHILD, VLLM)
HEEDED: Mapping[str, tuple[str, ...]] = {  # what is not here, all of them heed, or is refused elsewhere
    "page_tokens": OURS,
    "pages": OURS,
    "step_tokens": OURS,
    "dtype": OURS,
    "share_prompts": OURS,
    "batching": (HERE, CHILD),
    "prefill_tokens": (HERE, CHILD),
    "kernels": (HERE, CHILD),
    "python": (CHILD, VLLM),
    "start_s": (CHILD, VLLM, RUNNING, SGLANG),
    "tensor_parallel_size": (VLLM,),
    "gpu_memory_utilization": (VLLM,),
    "extra": (VLLM,),
}


def check_options(config: Config) -> None:
    """Raises ConfigError for an option of the engine section that is set and that the engine would ignore."""
    engine, way = config.engine, way_of(config)
    for name, heeding in HEEDED.items():
        if way not in heeding and getattr(engine, name) != EngineConfig.model_fields[name].default:
            remedy = f"leave it out: it is for {' and '.join(heeding)}"
            raise ConfigError(f"{way} takes no notice of it", where=f"engine.{name}", remedy=remedy)


def way_of(config: Config) -> str:
    """How the engines of a run are run."""
    if config.engine.kind == "vllm":
        return RUNNING if config.engine.url else VLLM
    if config.engine.kind == "sglang":
        return SGLANG
    return HERE if config.place.placement == "colocated" else CHILD
