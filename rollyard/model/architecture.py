"""The shape of a causal LM, read from a Hugging Face folder. Knows no torch: used for checks before anything loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollyard.errors import ConfigError

CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
WHERE = "model.path"
SETTINGS = "adapter_config.json"  # in the folder of an adapter


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the window of pre-training (`linear` or `llama3`).

    The last three belong to `llama3`; `original_window` is in tokens.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_window: int = 8192


@dataclass(frozen=True, slots=True)
class Architecture:
    """One decoder-only transformer: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Example: Architecture(family="llama", vocab_size=49152, hidden_size=576, layers=30, heads=9, kv_heads=3, head_dim=64,
    feed_forward=1536, window=2048, tied=True).
    """

    family: str  # "llama", "qwen2" or "qwen3"
    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    window: int  # tokens of prompt and completion at most
    rms_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied: bool = False  # the head is the embedding
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = None
    pad_id: int | None = None

    @property
    def qk_norm(self) -> bool:
        """Are queries and keys normalised per head before rotation?"""
        return self.family == "qwen3"

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied head counts once."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden_size * (2 * queries + 2 * keys)
        attention += (queries + 2 * keys) * self.qkv_bias + self.hidden_size * self.output_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * self.hidden_size * self.feed_forward + (2 * self.feed_forward + self.hidden_size) * self.mlp_bias
        layer = attention + mlp + 2 * self.hidden_size
        return self.layers * layer + self.hidden_size + (1 if self.tied else 2) * self.vocab_size * self.hidden_size

    @classmethod
    def from_folder(cls, folder: Path) -> Architecture:
        """Read config.json, and the end-of-sequence ids of generation_config.json too. For an adapter's folder, its model's.

        Raises ConfigError for a folder that is no model and for anything that would be computed wrongly.
        """
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}", where=WHERE, remedy="give the folder of a Hugging Face causal LM")
        folder = base_of(folder)
        path = folder / "config.json"
        if not path.is_file():
            raise ConfigError(f"{folder} has no config.json", where=WHERE, remedy="give the folder of a Hugging Face causal LM")
        generation = folder / "generation_config.json"
        try:
            return cls.from_hf(_read(path), _read(generation) if generation.is_file() else {})
        except (TypeError, ValueError, AttributeError, OverflowError) as error:  # a word where a number should be
            raise _broken(str(error)) from error

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> Architecture:
        """From the contents of config.json and generation_config.json. Raises ConfigError."""
        family = config.get("model_type")
        if family not in CLASSES:
            raise ConfigError(f"unknown model family {family!r}", where=WHERE, remedy=f"supported are {', '.join(CLASSES)}")
        _refuse_the_unsupported(config)
        heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
        kv_heads = heads if config.get("num_key_value_heads") is None else _count(config, "num_key_value_heads")
        if heads % kv_heads:
            raise _broken(f"{heads} attention heads do not divide into {kv_heads} key-value heads")
        attention_bias = family != "qwen2" and bool(config.get("attention_bias", False))
        theta, scaling = _rope(config)
        return cls(
            family=family,
            vocab_size=_count(config, "vocab_size"),
            hidden_size=hidden,
            layers=_count(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=_head_dim(config, family, hidden, heads),
            feed_forward=_count(config, "intermediate_size"),
            window=_count(config, "max_position_embeddings"),
            rms_eps=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias,
            mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
            eos_ids=_ids(config.get("eos_token_id")) | _ids((generation or {}).get("eos_token_id")),
            bos_id=config.get("bos_token_id"),
            pad_id=config.get("pad_token_id"),
        )

    def to_hf(self) -> dict[str, Any]:
        """The contents of a config.json that transformers loads."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if (scaling := self.rope_scaling) is not None:
            rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
            if scaling.kind == "llama3":
                rope["low_freq_factor"] = scaling.low_freq_factor
                rope["high_freq_factor"] = scaling.high_freq_factor
                rope["original_max_position_embeddings"] = scaling.original_window
        eos = sorted(self.eos_ids)
        config: dict[str, Any] = {
            "architectures": [CLASSES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.feed_forward,
            "hidden_act": "silu",
            "max_position_embeddings": self.window,
            "rms_norm_eps": self.rms_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tied,
            "bos_token_id": self.bos_id,
            "pad_token_id": self.pad_id,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        }
        if self.family != "qwen2":
            config["attention_bias"] = self.qkv_bias
        if self.family == "llama":
            config["mlp_bias"] = self.mlp_bias
        return config


def base_of(folder: Path) -> Path:
    """The folder of the model that an adapter in `folder` is for; of a model, its own. Raises ConfigError."""
    if not (folder / SETTINGS).is_file():
        return folder
    named = _read(folder / SETTINGS).get("base_model_name_or_path")
    if not isinstance(named, str) or not Path(named).is_dir():
        problem = f"the adapter in {folder} is for the model in {named}, which is no folder here"
        raise ConfigError(problem, where=WHERE, remedy=f"put the model there, or change {SETTINGS}")
    return Path(named)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", where=WHERE, remedy="it should be a JSON object") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object", where=WHERE, remedy="it should be one, as transformers writes it")
    return content


def _broken(problem: str) -> ConfigError:
    return ConfigError(f"config.json: {problem}", where=WHERE, remedy="give a complete Hugging Face model folder")


def _count(config: Mapping[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise _broken(f"{name} should be a whole number above 0, and is {value!r}")
    return value


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value) if isinstance(value, list) else frozenset((value,))


def _head_dim(config: Mapping[str, Any], family: str, hidden: int, heads: int) -> int:
    if family == "qwen2":  # transformers reads no head_dim for this family
        config = {}
    if config.get("head_dim") is not None:
        return _count(config, "head_dim")
    if family == "qwen3":
        return 128  # what transformers takes when a Qwen3 config is silent
    if hidden % heads:
        raise _broken(f"hidden_size {hidden} does not divide into {heads} heads")
    return hidden // heads


def _refuse_the_unsupported(config: Mapping[str, Any]) -> None:
    """Better refused than computed wrongly in silence."""
    activation = config.get("hidden_act", "silu")
    layer_types = config.get("layer_types") or []
    found = ""
    if activation != "silu":
        found = f"the activation {activation!r}"
    elif config.get("use_sliding_window") or any(kind != "full_attention" for kind in layer_types):
        found = "sliding-window attention"
    elif config.get("quantization_config"):
        found = "quantised weights"
    if found:
        raise ConfigError(f"it uses {found}", where=WHERE, remedy="only SiLU, full attention and plain weights are supported")


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling, from `rope_parameters` or from the older `rope_theta` and `rope_scaling`."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if kind not in ("default", "linear", "llama3") or partial != 1.0:
        what = f"rotary positions of type {kind!r}" if partial == 1.0 else f"rotary positions on {partial:g} of each head"
        raise ConfigError(f"it uses {what}", where=WHERE, remedy="supported are default, linear and llama3, on whole heads")
    if kind == "default":
        return theta, None
    try:
        factor = float(rope["factor"])
        if kind == "linear":
            return theta, RopeScaling(kind, factor)
        original = int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"])
        return theta, RopeScaling(kind, factor, float(rope["low_freq_factor"]), float(rope["high_freq_factor"]), original)
    except KeyError as error:
        raise _broken(f"rope parameters of type {kind} lack {error}") from error
