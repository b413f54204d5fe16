"""A model as its config.json says, as far as time and memory depend on it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of a causal language model. With experts `active` is less than `parameters`."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    parameters: int
    active: int  # parameters that one token is multiplied with, embeddings looked up left out
    cache: int  # numbers of keys and values of one token, over all layers
    experts: int = 0  # of a layer with experts
    experts_per_token: int = 0
    expert: int = 0  # parameters of one expert
    expert_layers: int = 0  # layers that have experts
    window: int = 0  # tokens that it was made for; 0: not said
