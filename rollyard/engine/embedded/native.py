"""Decoding with the kernels of `decoder.cpp`, on a CPU.

Weights are copied into panels once for each generation of the parameters. Whatever is packed is packed by `refresh`, and
only there, so no panel outlives an update; the runner checks the generation before every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import CDLL, POINTER, Structure, byref, c_double, c_float, c_int, c_int64, c_void_p
from time import perf_counter
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rollyard.engine.embedded.batch import Ints, flatten
from rollyard.engine.embedded.cache import PagedMemory
from rollyard.engine.embedded.compile import KernelsUnavailable
from rollyard.engine.embedded.pages import PagePool
from rollyard.engine.embedded.sampler import NEAR_EDGE
from rollyard.engine.embedded.scheduler import Plan
from rollyard.model.architecture import Architecture
from rollyard.model.transformer import Attention, CausalLM, FeedForward, Layer, rope_table

STORE, ADD, SWIGLU = 0, 1, 2


class _Linear(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("inputs", c_int64), ("outputs", c_int64), ("half", c_int))


class _Job(Structure):
    _fields_ = (
        ("panels", c_void_p), ("source", c_void_p), ("half", c_int), ("half_source", c_int),
        *((name, c_int64) for name in ("rows", "inputs", "first", "each", "offset")),
    )  # fmt: skip


class _Layer(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        *((name, _Linear) for name in ("qkv", "o", "gate_up", "down")),
        ("cache", c_void_p),
    )


class _Model(Structure):
    _fields_ = (
        ("layer", POINTER(_Layer)),
        ("norm", c_void_p),
        ("rope", c_void_p),
        *((name, c_int64) for name in ("layers", "width", "heads", "kv_heads", "head_dim", "feed_forward")),
        ("page_tokens", c_int64),
        ("page", c_int64),
        ("eps", c_float),
        ("half_cache", c_int),
    )


class _Batch(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("positions", "places", "rows", "tables")),
        ("tokens", c_int64),
        ("table_width", c_int64),
        *((name, c_void_p) for name in ("x", "normed", "qkv", "attended", "active", "half")),
    )


class Packed:
    """The weights of one or more linear layers with the same input, as panels.

    A panel holds all inputs of `outputs` outputs: float32 `[in, outputs]`, bfloat16 `[in / 2, outputs, 2]`. With `gated`
    it holds half as many outputs of each of two layers, which the kernel joins into silu(first) x second.
    """

    def __init__(self, sources: Sequence[torch.nn.Linear], vector: int, dtype: torch.dtype, gated: bool = False) -> None:
        self._sources, self._gated = sources, gated
        self.ending = SWIGLU if gated else STORE
        self.inputs = sources[0].in_features
        self.outputs = sources[0].out_features if gated else sum(source.out_features for source in sources)
        self._each = vector if gated else 2 * vector
        panels = -(-self.outputs // self._each)
        self.weight = torch.zeros(panels, self.inputs * 2 * vector, dtype=dtype)
        biased = any(source.bias is not None for source in sources)
        self.bias = torch.zeros(panels, 2 * vector) if biased else None

    @property
    def linear(self) -> _Linear:
        bias = None if self.bias is None else self.bias.data_ptr()
        return _Linear(self.weight.data_ptr(), bias, self.inputs, self.outputs, self.weight.dtype == torch.bfloat16)

    @property
    def bytes(self) -> int:
        return self.weight.numel() * self.weight.element_size()

    @property
    def jobs(self) -> Iterator[_Job]:
        """What is to be copied into the panels. The sources must stay meanwhile."""
        first = 0
        for index, source in enumerate(self._sources):
            weight = source.weight
            assert weight.is_contiguous() and weight.dtype in (torch.float32, torch.bfloat16)
            yield _Job(
                self.weight.data_ptr(), weight.data_ptr(), self.weight.dtype == torch.bfloat16, weight.dtype == torch.bfloat16,
                weight.shape[0], self.inputs, 0 if self._gated else first, self._each, index * self._each if self._gated else 0,
            )  # fmt: skip
            first += weight.shape[0]

    def pack_bias(self) -> None:
        """Copy the sources' biases as they are now."""
        if self.bias is not None:
            biases = [torch.zeros(each.out_features) if each.bias is None else each.bias.float() for each in self._sources]
            panels = self.bias.view(len(self.bias), -1, self._each)
            for index, values in enumerate(biases if self._gated else [torch.cat(biases)]):
                panels[:, index] = F.pad(values, (0, len(panels) * self._each - len(values))).view(len(panels), self._each)

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights of some outputs as they are packed: `[n]` int64 -> `[n, in]`."""
        panel, place = outputs // self._each, outputs % self._each
        if self.weight.dtype == torch.bfloat16:
            return self.weight.view(len(self.weight), self.inputs // 2, self._each, 2)[panel, :, place].flatten(1)
        return self.weight.view(len(self.weight), self.inputs, self._each)[panel, :, place]


class NativeDecoder:
    """Numbers of a token are the same whatever else is in its batch. Weights and cache in `dtype`, the rest in float32.

    A layer of the cache is `[pages, kv_heads * 2 * head_dim * page]`; see `decoder.cpp`.

    Args:
        library: the kernels.
        sole: nobody else uses the model: the memory of its parameters is given back once they are packed.

    Raises KernelsUnavailable where they do not take this model.
    """

    name = "native"

    def __init__(self, library: CDLL, model: CausalLM, pool: PagePool, dtype: torch.dtype, sole: bool = False) -> None:
        self._library = library
        library.rollyard_forward.restype = c_double
        vector = int(library.rollyard_vector())
        self._model, self._pool, self._dtype, self._sole = model, pool, dtype, sole
        arch = model.architecture
        _check_shapes(arch, vector)
        self._page = -(-pool.page_tokens // vector) * vector
        shape = (0, 2 * arch.kv_heads * arch.head_dim * self._page)
        self.memory = PagedMemory(arch.layers, shape, 0, pool.size, dtype, torch.device("cpu"))
        self._sources = cast(list[Layer], list(model.model.layers))
        self._packed = [_pack_layer(layer, vector, dtype) for layer in self._sources]
        self._head = Packed([_as_linear(model.head_weight)], vector, dtype)
        self._norms = [torch.empty(0)]
        self._rope = rope_table(arch, torch.float32, torch.device("cpu"))
        self._buffers = torch.empty(0)
        self._logits = torch.empty(0, 0)
        self.linear_s = 0.0
        self._layers = (_Layer * arch.layers)()
        self.copied_bytes = self._head.bytes + sum(part.bytes for parts in self._packed for part in parts.values())

    @torch.no_grad()
    def refresh(self) -> None:
        """Pack every weight anew."""
        pack(self._library, list(self.linears()))
        self._norms = []
        for layer, parts, entry in zip(self._sources, self._packed, self._layers, strict=True):
            for name, packed in parts.items():
                setattr(entry, name, packed.linear)
            entry.input_norm = self._keep(layer.input_layernorm.weight)
            entry.post_norm = self._keep(layer.post_attention_layernorm.weight)
            if self._model.architecture.qk_norm:
                entry.q_norm = self._keep(layer.self_attn.q_norm.weight)
                entry.k_norm = self._keep(layer.self_attn.k_norm.weight)
        self._keep(self._model.model.norm.weight)
        if self._sole:
            for name, parameter in self._model.named_parameters():
                if self._model.architecture.tied or name != "model.embed_tokens.weight":
                    parameter.data = parameter.data.new_empty(0)

    def release(self) -> None:
        """Give back the cache and what steps work in."""
        self.memory.release()
        self._buffers, self._logits = torch.empty(0), torch.empty(0, 0)

    def hidden(self, plan: Plan) -> Tensor:
        """`[tokens, hidden]` float32, valid until the next call."""
        arch = self._model.architecture
        flat = flatten(plan, self._pool.page_tokens)
        tokens = len(flat.ids)
        heads = arch.heads * arch.head_dim
        most = max(arch.hidden_size, heads, arch.feed_forward)
        widths = (
            arch.hidden_size,
            arch.hidden_size,
            heads + 2 * arch.kv_heads * arch.head_dim,
            heads,
            arch.feed_forward,
            most // 2,
        )
        x, normed, qkv, attended, active, half = self._scratch(tokens, widths)
        x.copy_(self._embedded(torch.from_numpy(flat.ids)))
        for entry, memory in zip(self._layers, self.memory.layers, strict=True):
            entry.cache = memory.data_ptr()
        model = _Model(
            self._layers, self._norms[-1].data_ptr(), self._rope.data_ptr(),
            arch.layers, arch.hidden_size, arch.heads, arch.kv_heads, arch.head_dim, arch.feed_forward,
            self._pool.page_tokens, self._page, arch.rms_eps, self._dtype == torch.bfloat16,
        )  # fmt: skip
        batch = _Batch(
            *(_address(array) for array in (flat.positions, flat.places, flat.rows, flat.tables)),
            tokens, flat.tables.shape[1], *(part.data_ptr() for part in (x, normed, qkv, attended, active, half)),
        )  # fmt: skip
        self.linear_s += self._library.rollyard_forward(byref(model), byref(batch), c_int(torch.get_num_threads()))
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """`[n, vocab]` float32, valid until the next call: new memory would cost as much as filling it."""
        if self._logits.shape[0] < hidden.shape[0]:
            self._logits = torch.empty(hidden.shape[0], self._head.outputs)
        began = perf_counter()
        apply(self._library, self._head, hidden, out=self._logits[: hidden.shape[0]])
        self.linear_s += perf_counter() - began
        return self._logits[: hidden.shape[0]]

    def choose(self, shaped: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A `sampler.Choose`."""
        return choose(self._library, shaped, noise, NEAR_EDGE)

    def linears(self) -> Iterator[Packed]:
        """All packed layers, in the order in which a step uses them."""
        for parts in self._packed:
            yield from parts.values()
        yield self._head

    def run_linears(self, x: Tensor, out: Tensor) -> None:
        """All of them, one after the other and nothing else: x `[n, most inputs]`, out `[n, most outputs]` float32."""
        layers = list(self.linears())
        structures = (_Linear * len(layers))(*(layer.linear for layer in layers))
        endings = (c_int * len(layers))(*(layer.ending for layer in layers))
        self._library.rollyard_linears(
            structures, endings, c_int64(len(layers)), c_void_p(x.data_ptr()), c_int64(x.shape[0]), c_void_p(out.data_ptr()),
            c_int(torch.get_num_threads()),
        )  # fmt: skip

    def _embedded(self, ids: Tensor) -> Tensor:
        """`[tokens, hidden]`"""
        if self._model.architecture.tied:
            return self._head.rows(ids)
        return F.embedding(ids, self._model.model.embed_tokens.weight).to(self._dtype)

    def _keep(self, weight: Tensor) -> int:
        """The address of a float32 copy, rounded as the others are, that lives until the next refresh."""
        self._norms.append(weight.to(self._dtype).to(torch.float32, copy=True))
        return self._norms[-1].data_ptr()

    def _scratch(self, tokens: int, widths: Sequence[int]) -> Sequence[Tensor]:
        """One buffer for each width, `[tokens, width]`, from memory that is kept between steps."""
        if self._buffers.numel() < tokens * sum(widths):
            self._buffers = torch.empty(tokens * sum(widths))
        parts = torch.split(self._buffers[: tokens * sum(widths)], [tokens * width for width in widths])
        return [part.view(tokens, width) for part, width in zip(parts, widths, strict=True)]


@torch.no_grad()
def pack(library: CDLL, layers: Sequence[Packed]) -> None:
    """Copy the sources' parameters as they are now into the panels of all these layers."""
    jobs = [job for layer in layers for job in layer.jobs]
    library.rollyard_pack((_Job * len(jobs))(*jobs), c_int64(len(jobs)), c_int(torch.get_num_threads()))
    for layer in layers:
        layer.pack_bias()


def apply(library: CDLL, packed: Packed, x: Tensor, ending: int = STORE, out: Tensor | None = None) -> Tensor:
    """One linear layer alone: x `[n, in]` float32 -> `[n, out]`; ADD adds to `out`."""
    x = x.contiguous()
    out = torch.empty(x.shape[0], packed.outputs) if out is None else out
    library.rollyard_linear(
        byref(packed.linear), c_void_p(x.data_ptr()), c_int64(x.shape[0]), c_void_p(out.data_ptr()),
        c_int(ending), c_int(torch.get_num_threads()),
    )  # fmt: skip
    return out


def choose(library: CDLL, shaped: Tensor, noise: Tensor, edge: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, logprobs and near ties; see `sampler.Choose`."""
    rows, vocab = shaped.shape
    tokens, logprobs = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.float64)
    near, shaped = torch.empty(rows, dtype=torch.bool), shaped.contiguous()
    library.rollyard_draw(
        c_void_p(shaped.data_ptr()), c_int64(rows), c_int64(vocab), c_void_p(noise.data_ptr()), c_double(edge),
        *(c_void_p(out.data_ptr()) for out in (tokens, logprobs, near)), c_int(torch.get_num_threads()),
    )  # fmt: skip
    return tokens, logprobs, near


def _check_shapes(arch: Architecture, vector: int) -> None:
    if arch.head_dim % vector:
        raise KernelsUnavailable(f"the kernels take heads of a multiple of {vector} numbers, not {arch.head_dim}")
    if any(size % 2 for size in (arch.hidden_size, arch.heads * arch.head_dim, arch.feed_forward)):
        raise KernelsUnavailable("the kernels take layers with an even number of inputs")


def _pack_layer(layer: Layer, vector: int, dtype: torch.dtype) -> dict[str, Packed]:
    attention: Attention = layer.self_attn
    mlp: FeedForward = layer.mlp
    return {
        "qkv": Packed([attention.q_proj, attention.k_proj, attention.v_proj], vector, dtype),
        "o": Packed([attention.o_proj], vector, dtype),
        "gate_up": Packed([mlp.gate_proj, mlp.up_proj], vector, dtype, gated=True),
        "down": Packed([mlp.down_proj], vector, dtype),
    }


def _as_linear(weight: Tensor) -> torch.nn.Linear:
    """The parameter itself, as a layer without a bias."""
    assert isinstance(weight, torch.nn.Parameter)
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = weight
    return linear


def _address(array: Ints) -> int:
    assert array.flags.c_contiguous and array.dtype == np.int64
    return array.ctypes.data
