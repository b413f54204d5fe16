"""How a step is computed: with plain torch, on any device, or with our own kernels on a CPU."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rollyard.config import EngineConfig
from rollyard.engine.embedded.cache import PagedMemory
from rollyard.engine.embedded.check import checked
from rollyard.engine.embedded.compile import KernelsUnavailable
from rollyard.engine.embedded.native import NativeDecoder
from rollyard.engine.embedded.pages import PagePool
from rollyard.engine.embedded.plain import PlainDecoder
from rollyard.engine.embedded.scheduler import Plan
from rollyard.errors import ConfigError
from rollyard.model.transformer import CausalLM


class Decoder(Protocol):
    """A forward pass over a plan's flat batch, with copies of the weights where it needs its own."""

    name: str
    memory: PagedMemory
    copied_bytes: int  # of weights, at each refresh
    linear_s: float  # seconds in linear layers so far, 0 where that is not measured

    def refresh(self) -> None:
        """Make derived copies anew: the model's parameters changed."""

    def release(self) -> None:
        """Give back the cache's memory, and what else only steps need."""

    def hidden(self, plan: Plan) -> Tensor:
        """`[tokens, hidden]` of the plan's flat batch, valid until the next call. Writes the cache."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` -> `[n, vocab]` float32."""
        ...

    def choose(self, shaped: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A `sampler.Choose`."""
        ...


def build(model: CausalLM, pool: PagePool, config: EngineConfig, sole: bool = False) -> Decoder:
    """The fastest decoder that this machine and model allow, or the one that the config names.

    Args:
        sole: nobody else uses the model, so a decoder that packs its parameters may give their memory back.

    Raises ConfigError when the kernels are asked for by name and cannot be had.
    """
    dtype = model.head_weight.dtype if config.dtype == "model" else getattr(torch, config.dtype)
    if config.kernels == "plain":
        return PlainDecoder(model, pool, dtype)
    try:
        if model.head_weight.device.type != "cpu":
            raise KernelsUnavailable("the kernels are for models on the CPU")
        return NativeDecoder(checked(), model, pool, dtype, sole)
    except KernelsUnavailable as reason:
        if config.kernels == "native":
            remedy = "use auto, which decodes with torch where the kernels are missing"
            raise ConfigError(str(reason), where="engine.kernels", remedy=remedy) from None
        return PlainDecoder(model, pool, dtype, f"plain ({reason})")
