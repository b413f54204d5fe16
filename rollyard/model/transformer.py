"""The packed forward pass, one for trainer and engine: flat tokens in, flat hidden states out.

Parameter names are Hugging Face's. How tokens attend to each other is the caller's: padded buckets when training, pages
of a key-value cache when generating.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rollyard.model.architecture import Architecture, RopeScaling
from rollyard.model.fused import Rotation, norm_gated, norm_linears, rotate
from rollyard.model.shards import Collectives, Whole, shard
from rollyard.model.stamp import WeightStamp


class Attend(Protocol):
    """Causal attention of a flat batch, given the rotated queries and keys of one layer."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q `[tokens, heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]` -> `[tokens, heads, head_dim]`."""
        ...


class Attention(nn.Module):
    def __init__(self, arch: Architecture, index: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.index, self.heads, self.kv_heads, self.head_dim = index, arch.heads, arch.kv_heads, arch.head_dim
        queries, keys, width = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim, arch.hidden_size
        self.q_proj = nn.Linear(width, queries, arch.qkv_bias, device, dtype)
        self.k_proj = nn.Linear(width, keys, arch.qkv_bias, device, dtype)
        self.v_proj = nn.Linear(width, keys, arch.qkv_bias, device, dtype)
        self.o_proj = nn.Linear(queries, width, arch.output_bias, device, dtype)
        self.qk_norm = arch.qk_norm
        if arch.qk_norm:
            self.q_norm = nn.RMSNorm(arch.head_dim, arch.rms_eps, device=device, dtype=dtype)
            self.k_norm = nn.RMSNorm(arch.head_dim, arch.rms_eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, norm: nn.RMSNorm, rotation: Rotation, attend: Attend) -> Tensor:
        """Attention of the normalised x, before it is added to x."""
        q, k, v = norm_linears(x, norm, (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.view(x.shape[0], -1, self.head_dim) for part in (q, k, v))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rotate(part, rotation).to(v.dtype) for part in (q, k))
        attended = attend(self.index, q, k, v)
        out: Tensor = self.o_proj(attended.reshape(x.shape[0], -1))
        return out


class FeedForward(nn.Module):
    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(arch.hidden_size, arch.feed_forward, arch.mlp_bias, device, dtype)
        self.up_proj = nn.Linear(arch.hidden_size, arch.feed_forward, arch.mlp_bias, device, dtype)
        self.down_proj = nn.Linear(arch.feed_forward, arch.hidden_size, arch.mlp_bias, device, dtype)

    def forward(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        """x + the feed-forward of the normalised x."""
        return norm_gated(x, norm, self.gate_proj, self.up_proj, self.down_proj)


class Layer(nn.Module):
    def __init__(self, arch: Architecture, index: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(arch.hidden_size, arch.rms_eps, device=device, dtype=dtype)
        self.self_attn = Attention(arch, index, dtype, device)
        self.post_attention_layernorm = nn.RMSNorm(arch.hidden_size, arch.rms_eps, device=device, dtype=dtype)
        self.mlp = FeedForward(arch, dtype, device)
        self.recompute = False  # keep its input alone for the backward pass

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        if not (self.recompute and torch.is_grad_enabled()):
            return self._through(x, rotation, attend)
        # Inside the layer, so that one whose rows are shared is gathered when it computes again. Nothing in it is random.
        out: Tensor = checkpoint(self._through, x, rotation, attend, use_reentrant=False, preserve_rng_state=False)
        return out

    def _through(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        x = x + self.self_attn(x, self.input_layernorm, rotation, attend)
        out: Tensor = self.mlp(x, self.post_attention_layernorm)
        return out


class Decoder(nn.Module):
    """What Hugging Face calls `model`: everything but the head."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size, device=device, dtype=dtype)
        self.layers = nn.ModuleList(Layer(arch, index, dtype, device) for index in range(arch.layers))
        self.norm = nn.RMSNorm(arch.hidden_size, arch.rms_eps, device=device, dtype=dtype)
        # A plain attribute, set by CausalLM: no part of a checkpoint, and never on the meta device.
        self.rope: Tensor

    def forward(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        cos, sin = self.rope.index_select(0, positions).unbind(1)
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, (cos, sin), attend)
        out: Tensor = self.norm(x)
        return out


class CausalLM(nn.Module):
    """A causal language model whose `state_dict` has Hugging Face's names. Dtype and device are fixed at construction.

    Parameters are uninitialised until `initialise`, or `folder.load`, fills them. Change them only inside
    `stamp.writing()`: engines that share them look at the stamp before every forward pass.
    """

    def __init__(
        self, architecture: Architecture, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> None:
        super().__init__()
        device, nowhere = torch.device(device), torch.device("meta")
        self.architecture = architecture
        self.stamp = WeightStamp()
        self.parts = Whole()
        self.model = Decoder(architecture, dtype, nowhere)
        if not architecture.tied:
            self.lm_head = nn.Linear(architecture.hidden_size, architecture.vocab_size, False, nowhere, dtype)
        self.to_empty(device=device)
        self.model.rope = rope_table(architecture, dtype, device)

    @classmethod
    def of_ranks(cls, architecture: Architecture, dtype: torch.dtype, device: torch.device, ranks: Collectives) -> CausalLM:
        """A model of which only this rank's rows are here. Raises ConfigError where torch cannot do that."""
        model = cls(architecture, dtype, "meta")
        model.parts = shard(model, model.model.layers, ranks, device)
        model.model.rope = rope_table(architecture, dtype, device)
        return model

    def trained(self) -> dict[str, nn.Parameter]:
        """What is trained and travels, by name: every parameter, a tied head left out; of a model with an adapter that alone."""
        parameters = dict(self.named_parameters())
        adapter = {name.replace(".default.", "."): each for name, each in parameters.items() if ".lora_" in name}
        return adapter or parameters

    def recompute(self, *, layers: bool) -> None:
        """Keep the input of each layer alone for a backward pass, and compute the layer again there; or keep all."""
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            layer.recompute = layers

    @property
    def adapted(self) -> bool:
        """Is there an adapter around parameters that are frozen?"""
        return any(".lora_" in name for name, _ in self.named_parameters())

    @property
    def head_weight(self) -> Tensor:
        """`[vocab, hidden]`: the head, which is the embedding when tied."""
        return self.model.embed_tokens.weight if self.architecture.tied else self.lm_head.weight

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm.

        Args:
            ids: `[tokens]` int64, of all sequences one after the other.
            positions: `[tokens]` int64, the place of each token in its sequence.
            attend: attention over this flat batch.

        Returns:
            `[tokens, hidden]` in the model's dtype.
        """
        out: Tensor = self.model(ids, positions, attend)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, hidden]` -> `[n, vocab]` float32. For few rows; training uses `head.forward_backward`."""
        return F.linear(hidden, self.head_weight).float()

    @torch.no_grad()
    def initialise(self, seed: int, std: float = 0.02) -> None:
        """Random weights for a new model: matrices normal(0, std), biases 0, norms 1."""
        generator = torch.Generator().manual_seed(seed)
        with self.stamp.writing():
            for name, parameter in self.named_parameters():
                if parameter.dim() == 2:
                    parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))
                else:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)


def rope_table(arch: Architecture, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[window, 2, 1, head_dim]`: cosines and signed sines of every position, computed in float32.

    Source: RoFormer, https://arxiv.org/abs/2104.09864.
    """
    exponent = torch.arange(0, arch.head_dim, 2, dtype=torch.float32, device=device) / arch.head_dim
    frequencies = 1.0 / arch.rope_theta**exponent
    if arch.rope_scaling is not None:
        frequencies = stretched(frequencies, arch.rope_scaling)
    angles = torch.arange(arch.window, dtype=torch.float32, device=device)[:, None] * frequencies
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)), dim=1)
    return table[:, :, None, :].to(dtype)


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Rotary frequencies `[head_dim / 2]` stretched for a longer window.

    `llama3` divides only the frequencies whose waves are longer than the original window allows, and blends in between;
    source: the Llama 3 reference code, https://github.com/meta-llama/llama-models.
    """
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_window * frequencies / (2 * math.pi)  # full turns within the original window
    blend = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0.0, 1.0)
    return frequencies * blend + frequencies / scaling.factor * (1.0 - blend)
