"""Models that go by a name, and the shape of the one that a scenario is about.

The numbers are those of the config.json that each publisher ships with the model on huggingface.co.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture, base_of
from rollyard.plan.shape import WHERE, Shape


def _dense(
    family: str, hidden: int, wide: int, layers: int, heads: int, kv_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    } | more


def _qwen3_moe(hidden: int, expert: int, layers: int, heads: int) -> dict[str, Any]:
    more = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": expert}
    return _dense("qwen3_moe", hidden, 3 * hidden, layers, heads, 4, 151936, max_position_embeddings=40960, **more)


def _deepseek(family: str, heads: int, vocabulary: int, experts: int, dense: int, window: int) -> dict[str, Any]:
    latent = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    routed = {"n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048}
    more = {"first_k_dense_replace": dense, "max_position_embeddings": window}
    return _dense(family, 7168, 18432, 61, heads, heads, vocabulary, **latent, **routed, **more)


MODELS: Final[Mapping[str, Mapping[str, Any]]] = {
    "smollm2-135m": _dense("llama", 576, 1536, 30, 9, 3, 49152, max_position_embeddings=8192, tie_word_embeddings=True),
    "qwen3-0.6b": _dense(
        "qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True
    ),
    "llama-1b": _dense("llama", 2048, 8192, 16, 32, 8, 128256, max_position_embeddings=131072, tie_word_embeddings=True),
    "qwen2.5-1.5b": _dense("qwen2", 1536, 8960, 28, 12, 2, 151936, max_position_embeddings=131072, tie_word_embeddings=True),
    "deepseek-r1-distill-qwen-1.5b": _dense("qwen2", 1536, 8960, 28, 12, 2, 151936, max_position_embeddings=131072),
    "qwen3-4b": _dense(
        "qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True
    ),
    "mistral-7b": _dense("mistral", 4096, 14336, 32, 32, 8, 32000, max_position_embeddings=32768, sliding_window=None),
    "qwen2.5-7b": _dense("qwen2", 3584, 18944, 28, 28, 4, 152064, max_position_embeddings=131072),
    "llama-8b": _dense("llama", 4096, 14336, 32, 32, 8, 128256, max_position_embeddings=131072),
    "qwen3-8b": _dense("qwen3", 4096, 12288, 36, 32, 8, 151936, head_dim=128, max_position_embeddings=40960),
    "qwen2.5-32b": _dense("qwen2", 5120, 27648, 64, 40, 8, 152064, max_position_embeddings=131072),
    "qwen3-32b": _dense("qwen3", 5120, 25600, 64, 64, 8, 151936, head_dim=128, max_position_embeddings=40960),
    "llama-70b": _dense("llama", 8192, 28672, 80, 64, 8, 128256, max_position_embeddings=131072),
    "qwen2.5-72b": _dense("qwen2", 8192, 29568, 80, 64, 8, 152064, max_position_embeddings=131072),
    "mixtral-8x7b": _dense(
        "mixtral", 4096, 14336, 32, 32, 8, 32000, max_position_embeddings=32768, num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32),
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64),
    "deepseek-v3": _deepseek("deepseek_v3", 128, 129280, 256, 3, 163840),
    "kimi-k2": _deepseek("kimi_k2", 64, 163840, 384, 1, 131072),
}


def shape_of(path: str) -> Shape:
    """A model's shape.

    Args:
        path: the model's folder, or that of an adapter for it; its config.json; or a name of `MODELS`.

    Raises:
        ConfigError: there is no such model, or its config.json is of a kind that is not known.
    """
    if path in MODELS:
        return Shape.from_hf(MODELS[path], path)
    place, config = _read(path)
    return Shape.from_hf(config, place.resolve().parent.name)


def architecture_of(path: str) -> Architecture:
    """As a run reads it. Raises ConfigError where `shape_of` does, and for a model that no run computes."""
    return Architecture.from_hf(MODELS[path] if path in MODELS else _read(path)[1])


def is_folder(path: str) -> bool:
    """A run can load it; else it is a name, or a config.json by itself."""
    return path not in MODELS and Path(path).is_dir()


def _read(path: str) -> tuple[Path, Mapping[str, Any]]:
    place = Path(path)
    if place.is_dir():
        place = base_of(place) / "config.json"
    if not place.is_file():
        remedy = f"give its folder, its config.json, or one of: {', '.join(MODELS)}"
        raise ConfigError(f"there is no model {path!r}", where=WHERE, remedy=remedy)
    try:
        config = json.loads(place.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{place} cannot be read: {error}", where=WHERE, remedy="it should be a JSON object") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{place} holds no JSON object", where=WHERE, remedy="it should be one, as transformers writes it")
    return place, config
