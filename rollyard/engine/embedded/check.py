"""The kernels beside plain torch, once a process, before they decode anything: what a compiler got wrong would not show."""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import CDLL
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from rollyard.engine.embedded.compile import KernelsUnavailable, kernels
from rollyard.engine.embedded.native import STORE, SWIGLU, NativeDecoder, Packed, apply, choose, pack
from rollyard.engine.embedded.pages import PagePool, PageTable
from rollyard.engine.embedded.plain import PlainDecoder
from rollyard.engine.embedded.sampler import NEAR_EDGE, by_inverse_cdf
from rollyard.engine.embedded.scheduler import Chunk, Plan
from rollyard.model.architecture import Architecture
from rollyard.model.transformer import CausalLM

EXACT = 2e-4
TOLERANCES = {torch.float32: EXACT, torch.bfloat16: 0.25}  # of numbers of about 1, after a pass with such a cache


def checked() -> CDLL:
    """The kernels of this machine, which agree with torch. Raises KernelsUnavailable."""
    library = kernels()
    if wrong := disagreement(library):
        raise KernelsUnavailable(f"the compiled kernels give other numbers than torch in {wrong}")
    return library


@cache
@torch.no_grad()
def disagreement(library: CDLL) -> str:
    """What the kernels compute wrongly; empty where they agree with torch."""
    noise = torch.Generator().manual_seed(0)
    for dtype in TOLERANCES:
        if not _layers_agree(library, dtype, noise):
            return f"linear layers in {_name(dtype)}"
    if not _draws_agree(library, noise):
        return "draws of tokens"
    vector = int(library.rollyard_vector())
    for arch in _architectures(vector):
        model, pool = _model(arch, noise), PagePool(3, 3 * vector - 2)  # pages that are no multiple of a vector
        plan = _plan(pool)
        expected = _passed(PlainDecoder(model, pool, torch.float32), plan)
        for dtype, tolerance in TOLERANCES.items():
            found = _passed(NativeDecoder(library, model, pool, dtype), plan)
            if not torch.allclose(found, expected, rtol=0, atol=tolerance):
                return f"a forward pass in {_name(dtype)}, {arch.heads // arch.kv_heads} queries to a key"
    return ""


def _layers_agree(library: CDLL, dtype: torch.dtype, noise: torch.Generator) -> bool:
    """Any number of rows up to two tiles; inputs that are packed in two parts, with some left over."""
    x = _rounded((25, 522), 1.0, noise)
    gate, up = (torch.nn.Linear(522, 50, device="meta") for _ in range(2))
    for layer in (gate, up):
        layer.weight = torch.nn.Parameter(_rounded((50, 522), 0.1, noise))
        layer.bias = torch.nn.Parameter(_rounded((50,), 1.0, noise))
    vector = int(library.rollyard_vector())
    plain, gated = Packed([gate, up], vector, dtype), Packed([gate, up], vector, dtype, gated=True)
    pack(library, [plain, gated])
    first, second = gate(x), up(x)
    for packed, ending, expected in (
        (plain, STORE, torch.cat((first, second), dim=1)),
        (gated, SWIGLU, F.silu(first) * second),
    ):
        for rows in range(1, len(x) + 1):
            if not torch.allclose(apply(library, packed, x[:rows], ending), expected[:rows], rtol=EXACT, atol=EXACT):
                return False
    return True


def _draws_agree(library: CDLL, noise: torch.Generator) -> bool:
    logits = torch.randn(32, 603, generator=noise) * 3  # two blocks of the vocabulary, and a part of one
    logits[:, ::3] = -torch.inf
    where = torch.rand(32, generator=noise, dtype=torch.float64)
    tokens, logprobs, near = choose(library, logits, where, NEAR_EDGE)
    expected, expected_logprobs, expected_near = by_inverse_cdf(logits, where)
    sure = ~(near | expected_near)
    same = torch.equal(tokens[sure], expected[sure]) and torch.allclose(logprobs[sure], expected_logprobs[sure], atol=EXACT)
    return same and int(sure.sum()) > 16


def _architectures(vector: int) -> Iterator[Architecture]:
    """All sizes of groups that attention computes at once, 1 to 4, and heads that are no multiple of what it takes at once."""
    for heads, kv_heads, family in ((14, 2, "qwen3"), (4, 2, "llama"), (2, 2, "qwen2")):
        yield Architecture(
            family, vocab_size=2 * vector + 3, hidden_size=4 * vector + 6, layers=2, heads=heads, kv_heads=kv_heads,
            head_dim=5 * vector, feed_forward=3 * vector + 2, window=4 * vector, tied=True, qkv_bias=family == "qwen2",
        )  # fmt: skip


def _model(arch: Architecture, noise: torch.Generator) -> CausalLM:
    """Weights that matter, so that none of a pass could be left out, and that are bfloat16 numbers."""
    model = CausalLM(arch)
    with model.stamp.writing():
        for name, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() == 1 or "embed" in name else 1.5 * parameter.shape[1] ** -0.5
            parameter.copy_(_rounded(parameter.shape, scale, noise) + (1.0 if "norm" in name else 0.0))
    return model


def _plan(pool: PagePool) -> Plan:
    """Two pages of a sequence, and another one's page between them."""
    long, short = PageTable(), PageTable()
    for table, tokens in ((long, pool.page_tokens), (short, 3), (long, 5)):
        pool.extend(table, tokens)
        table.tokens += tokens
    chunks = [Chunk(tuple(token % 17 for token in range(table.tokens)), 0, table) for table in (long, short)]
    return Plan(chunks=chunks, chunk_tokens=long.tokens + short.tokens)


def _passed(decoder: PlainDecoder | NativeDecoder, plan: Plan) -> Tensor:
    """Hidden states and logits of each token."""
    decoder.refresh()
    decoder.memory.reserve(3)
    hidden = decoder.hidden(plan)
    return torch.cat((hidden, decoder.logits(hidden)), dim=1)


def _rounded(shape: tuple[int, ...], scale: float, noise: torch.Generator) -> Tensor:
    """Random numbers that bfloat16 holds as they are."""
    return (torch.randn(shape, generator=noise) * scale).bfloat16().float()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
