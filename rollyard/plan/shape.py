"""A model as its config.json says, as far as time and memory depend on it (PURE).

Read are dense models (llama, mistral, qwen2, qwen3, gemma), models with experts (mixtral, qwen2_moe, qwen3_moe), and those with
latent attention besides (deepseek_v2, deepseek_v3, kimi_k2). Layers that only predict further tokens in training are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rollyard.errors import ConfigError

WHERE: Final = "model.path"
GROUPED: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma")
WITH_EXPERTS: Final = ("mixtral", "qwen2_moe", "qwen3_moe")
LATENT: Final = ("deepseek_v2", "deepseek_v3", "kimi_k2")
FAMILIES: Final = (*GROUPED, *WITH_EXPERTS, *LATENT)
_V3: Final = {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3}
LEFT_OUT: Final[Mapping[str, Mapping[str, Any]]] = {  # what transformers takes where a config.json is silent
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "gemma": {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3_moe": {"num_key_value_heads": 4},
    "deepseek_v2": {"q_lora_rank": 1536, "n_shared_experts": 2, "first_k_dense_replace": 0},
    "deepseek_v3": _V3,
    "kimi_k2": _V3,
}
MOST: Final = 2**31  # of any number of a config.json
DEEPEST: Final = 100_000  # layers
SHOWN: Final = 60  # characters of what is wrong


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of a causal language model. With experts `active` is less than `parameters`."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int  # with latent attention 1: every device of an engine needs what all heads share
    head_dim: int
    vocabulary: int
    parameters: int
    active: int  # parameters that one token is multiplied with, embeddings looked up left out
    cache: int  # numbers of keys and values of one token, over all layers
    attended: int  # multiply-adds for a pair of tokens that attend, over all layers, when keys and values are at hand
    read: int  # the same when a token is decoded; more with latent attention, which leaves them compressed
    experts: int = 0  # of a layer with experts
    experts_per_token: int = 0
    expert: int = 0  # parameters of one expert
    expert_layers: int = 0  # layers that have experts
    window: int = 0  # tokens that it was made for; 0: not said
    sliding: int = 0  # tokens that some layers look back at most; 0: all of them
    feed_forward: int = 0  # between the two halves of a layer's feed-forward part; 0: it has experts

    @property
    def head(self) -> int:
        """Parameters of the product that gives logits; only tokens that something is predicted from need it."""
        return self.vocabulary * self.hidden

    @property
    def shared(self) -> int:
        """Parameters that every token is multiplied with, whichever experts it goes to."""
        return self.active - self.expert_layers * self.experts_per_token * self.expert

    def touched(self, tokens: float) -> float:
        """Parameters that a forward pass of so many tokens reads.

        Of E experts, k of which a token goes to, `E (1 - (1 - k / E) ** tokens)` are expected to have any, where each is as
        likely as another.
        """
        if not self.experts:
            return self.shared
        missed: float = (1 - self.experts_per_token / self.experts) ** tokens
        return self.shared + self.expert_layers * self.experts * (1 - missed) * self.expert

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], name: str = "") -> Shape:
        """From the contents of a config.json.

        Raises:
            ConfigError: it is of another family, lacks a number, or has one that cannot be.
        """
        family = config.get("model_type")
        if not isinstance(family, str) or family not in FAMILIES:
            problem = f"models of type {family!r} cannot be told from their config.json"
            raise ConfigError(problem, where=WHERE, remedy=f"known are {', '.join(FAMILIES)}")
        read = _Config({**LEFT_OUT.get(family, {}), **config})
        attention = _latent(read) if family in LATENT else _grouped(read, family)
        layers, hidden, vocabulary = read.count("num_hidden_layers", DEEPEST), read.count("hidden_size"), read.count("vocab_size")
        experts = _Experts() if family in GROUPED else _experts(read, family, layers)
        dense = 3 * hidden * read.count("intermediate_size") if experts.layers < layers else 0
        if family == "llama" and read.on("mlp_bias"):
            dense += 2 * read.count("intermediate_size") + hidden
        # Two norms a layer, and one after the last. With a tied head the embedding is multiplied with all the same.
        common = layers * (attention.parameters + 2 * hidden) + hidden + (layers - experts.layers) * dense
        common += experts.layers * experts.common + vocabulary * hidden
        looked_up = 0 if read.on("tie_word_embeddings") else vocabulary * hidden
        return cls(
            name=name or str(family),
            layers=layers,
            hidden=hidden,
            heads=read.count("num_attention_heads"),
            kv_heads=attention.kv_heads,
            head_dim=attention.head_dim,
            vocabulary=vocabulary,
            parameters=common + looked_up + experts.layers * experts.count * experts.each,
            active=common + experts.layers * experts.per_token * experts.each,
            cache=layers * attention.cache,
            attended=layers * attention.attended,
            read=layers * attention.read,
            experts=experts.count,
            experts_per_token=experts.per_token,
            expert=experts.each,
            expert_layers=experts.layers,
            window=read.some("max_position_embeddings"),
            sliding=_sliding(read, family),
            feed_forward=0 if experts.layers else read.count("intermediate_size"),
        )


@dataclass(frozen=True, slots=True)
class _Attention:
    """Of one layer."""

    parameters: int
    kv_heads: int
    head_dim: int
    cache: int
    attended: int
    read: int


@dataclass(frozen=True, slots=True)
class _Experts:
    layers: int = 0
    count: int = 0
    per_token: int = 0
    each: int = 0  # parameters of one
    common: int = 0  # parameters of such a layer that all tokens use: router, shared experts


class _Config:
    """Its numbers, or an error that names them."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def count(self, name: str, most: int = MOST) -> int:
        """One that must be there. Raises ConfigError."""
        return self._whole(name, 1, most)

    def some(self, name: str) -> int:
        """One that may be left out or be null, which is 0. Raises ConfigError."""
        return 0 if self._config.get(name) is None else self.count(name)

    def any(self, name: str) -> int:
        """One that may be 0 too. Raises ConfigError."""
        return 0 if self._config.get(name) is None else self._whole(name, 0, MOST)

    def on(self, name: str) -> bool:
        """True or false; false where it is left out or null. Raises ConfigError."""
        value = self._config.get(name)
        if value is not None and not isinstance(value, bool):
            raise wrong(f"{name} should be true or false, and is {shown(value)}")
        return bool(value)

    def layers(self, name: str) -> set[int]:
        """Numbers of layers; none where it is left out or null. Raises ConfigError."""
        value = self._config.get(name)
        if value is None:
            return set()
        if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
            raise wrong(f"{name} should be a list of whole numbers, and is {shown(value)}")
        return set(value)

    def _whole(self, name: str, least: int, most: int) -> int:
        value = self._config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            bound = f"above {least - 1}" if least else "from 0 on"
            raise wrong(f"{name} should be a whole number {bound}, and is {shown(value)}")
        if value > most:
            raise wrong(f"{name} is more than {most:,}")
        return value


def wrong(problem: str) -> ConfigError:
    """Of what a config.json says."""
    return ConfigError(f"config.json: {problem}", where=WHERE, remedy="give a complete config.json of a Hugging Face model")


def shown(value: object) -> str:
    """As an error shows it, not longer than a line."""
    told = repr(value)
    return told if len(told) <= SHOWN else told[:SHOWN] + "..."


def _grouped(read: _Config, family: str) -> _Attention:
    """Heads that share keys and values in groups (Ainslie et al. 2023, arXiv 2305.13245)."""
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    kv_heads = read.some("num_key_value_heads") or heads
    if heads % kv_heads:
        raise wrong(f"{heads} attention heads do not divide into {kv_heads} key-value heads")
    own = 0 if family == "qwen2" else read.some("head_dim")  # transformers reads none for this family
    size = own or hidden // heads
    if not size:
        raise wrong(f"a hidden size of {hidden} is less than one for each of {heads} attention heads")
    queries, keys = heads * size, kv_heads * size
    parameters = hidden * (2 * queries + 2 * keys)
    if family in ("qwen2", "qwen2_moe"):
        parameters += queries + 2 * keys
    elif read.on("attention_bias"):
        parameters += queries + 2 * keys + hidden
    if family in ("qwen3", "qwen3_moe"):
        parameters += 2 * size  # norms of queries and keys
    return _Attention(parameters, kv_heads, size, 2 * keys, 2 * queries, 2 * queries)


def _latent(read: _Config) -> _Attention:
    """Keys and values that all heads unfold from one latent vector (DeepSeek-V2, arXiv 2405.04434).

    While a token is decoded they stay folded, and each head works on the latent vector itself.
    """
    hidden, heads = read.count("hidden_size"), read.count("num_attention_heads")
    rank, plain, rotary = read.count("kv_lora_rank"), read.count("qk_nope_head_dim"), read.count("qk_rope_head_dim")
    values, low = read.count("v_head_dim"), read.some("q_lora_rank")
    queries = heads * (plain + rotary)
    parameters = hidden * low + low + low * queries if low else hidden * queries
    parameters += hidden * (rank + rotary) + rank + rank * heads * (plain + values) + heads * values * hidden
    cache, attended = rank + rotary, heads * (plain + rotary + values)
    return _Attention(parameters, 1, plain + rotary, cache, attended, heads * (rank + rotary + rank))


def _experts(read: _Config, family: str, layers: int) -> _Experts:
    hidden, per_token = read.count("hidden_size"), read.count("num_experts_per_tok")
    if family == "mixtral":
        count = _enough(read.count("num_local_experts"), per_token)
        each = 3 * hidden * read.count("intermediate_size")
        return _Experts(layers, count, per_token, each, hidden * count)
    each = 3 * hidden * read.count("moe_intermediate_size")
    if family in LATENT:
        count, first = _enough(read.count("n_routed_experts"), per_token), read.any("first_k_dense_replace")
        every = read.some("moe_layer_freq") or 1
        sparse = sum(layer >= first and layer % every == 0 for layer in range(layers))
        bias = 0 if family == "deepseek_v2" else count  # the router's correction
        common = hidden * count + bias + read.any("n_shared_experts") * each
    else:
        count, every = _enough(read.count("num_experts"), per_token), read.some("decoder_sparse_step") or 1
        dense = read.layers("mlp_only_layers")
        sparse = sum(layer not in dense and (layer + 1) % every == 0 for layer in range(layers))
        common = hidden * count
        if family == "qwen2_moe":
            common += 3 * hidden * read.count("shared_expert_intermediate_size") + hidden
    return _Experts(sparse, count, per_token, each, common)


def _enough(experts: int, per_token: int) -> int:
    """Raises ConfigError where a token would go to more than there are."""
    if per_token > experts:
        raise wrong(f"num_experts_per_tok is {per_token}, and there are {experts} experts")
    return experts


def _sliding(read: _Config, family: str) -> int:
    """Qwen's configs name a window that is off unless they say so; mistral's is on where it is named."""
    on = family in ("mistral", "mixtral") or read.on("use_sliding_window")
    return read.some("sliding_window") if on else 0
