"""Who needs what (PURE): the part of every tensor that each worker of a tensor-parallel engine computes with.

These are vLLM's rules. Heads, and what the feed-forward is wide, are divided among the workers: matrices that come first by
rows, those behind them by columns. The vocabulary is padded, then divided by rows. Everything else all workers have whole.
vLLM's worker holds its loader to them at each load (`engine.vllm.reads`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rollyard.errors import ConfigError
from rollyard.events import EngineId
from rollyard.model.architecture import Architecture
from rollyard.types import Slice, TensorInfo

WHERE = "engine.tensor_parallel_size"
PADDING = 64  # the vocabulary becomes a multiple of it


def worker_name(engine: EngineId, rank: int) -> str:
    """What a transport calls one worker of an engine that has several."""
    return f"{engine}.{rank}"


def check_divides(shape: Architecture, workers: int) -> None:
    """Raises ConfigError when what has to be divided among so many workers cannot be."""
    if problem := _problem(shape, workers):
        fitting = [str(count) for count in (1, 2, 4, 8, 16) if not _problem(shape, count)]
        raise ConfigError(problem, where=WHERE, remedy=f"use {' or '.join(fitting)}")


def shares(tensors: Sequence[TensorInfo], shape: Architecture, workers: int) -> tuple[tuple[Slice | None, ...], ...]:
    """`[workers][tensors]`; None where a worker needs the whole tensor. Raises ConfigError, see `check_divides`."""
    check_divides(shape, workers)
    return tuple(tuple(_share(info, shape, rank, workers) for info in tensors) for rank in range(workers))


def _share(info: TensorInfo, shape: Architecture, rank: int, workers: int) -> Slice | None:
    if info.name in ("model.embed_tokens.weight", "lm_head.weight"):
        each = _padded(shape) // workers
        return Slice(0, min(rank * each, shape.vocab_size), min((rank + 1) * each, shape.vocab_size))
    *_, module, kind = info.name.split(".")
    match module:
        case "q_proj" | "gate_proj" | "up_proj":
            return _part(0, info.shape[0], rank, workers)
        case "k_proj" | "v_proj":
            owners = min(workers, shape.kv_heads)
            return _part(0, info.shape[0], rank * owners // workers, owners)
        case "o_proj" | "down_proj" if kind == "weight":
            return _part(1, info.shape[1], rank, workers)
        case _:
            return None


def _padded(shape: Architecture) -> int:
    return -(-shape.vocab_size // PADDING) * PADDING


def _part(dim: int, size: int, number: int, parts: int) -> Slice:
    each = size // parts
    return Slice(dim, number * each, (number + 1) * each)


def _problem(shape: Architecture, workers: int) -> str:
    for what, count in (("heads", shape.heads), ("columns of the feed-forward", shape.feed_forward)):
        if count % workers:
            return f"{count} {what} cannot be divided among {workers} workers"
    if shape.kv_heads % workers and workers % shape.kv_heads:
        return f"{shape.kv_heads} key-value heads cannot be divided among {workers} workers, nor {workers} among them"
    if _padded(shape) % workers:
        return f"{_padded(shape)} rows of the padded vocabulary cannot be divided among {workers} workers"
    return ""
