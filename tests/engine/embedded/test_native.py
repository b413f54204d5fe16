"""The CPU kernels: against torch, and what they promise about batches and weight updates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from rollyard.config import EngineConfig
from rollyard.engine.embedded import compile as compiling
from rollyard.engine.embedded.compile import KernelsUnavailable, kernels
from rollyard.engine.embedded.decoder import build
from rollyard.engine.embedded.native import ADD, STORE, SWIGLU, NativeDecoder, Packed, apply, pack
from rollyard.engine.embedded.pages import PagePool
from rollyard.engine.embedded.plain import PlainDecoder
from rollyard.engine.embedded.sampler import NEAR_EDGE, by_inverse_cdf
from rollyard.errors import ConfigError, EngineLost, WeightSyncError
from rollyard.model.folder import load
from rollyard.types import WeightVersion
from tests.compiler import needs_compiler
from tests.engine.embedded.serving import Reference, answers, ask, change, serving
from tests.tiny import tiny_folder

pytestmark = [
    needs_compiler,
    pytest.mark.timeout(240),  # the first of them compiles
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"))


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype).float()


@settings(max_examples=60)
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 40),
    outputs=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    bias=st.booleans(),
    half=st.booleans(),
    ending=st.sampled_from((STORE, ADD, SWIGLU)),
    threads=st.integers(1, 3),
    dot=st.booleans(),
)
@torch.no_grad()
def test_a_packed_layer_is_the_layer(
    rows: int, inputs: int, outputs: list[int], bias: bool, half: bool, ending: int, threads: int, dot: bool
) -> None:
    """`dot`: as on a CPU that multiplies bfloat16, where inputs are rounded too; on such a CPU always."""
    dtype = torch.bfloat16 if half else torch.float32
    if ending == SWIGLU:
        outputs = [outputs[0]] * 2
    sources = [torch.nn.Linear(2 * inputs, each, bias) for each in outputs]
    library = kernels("ROLLYARD_DOT") if dot else kernels()
    packed = Packed(sources, int(library.rollyard_vector()), dtype, gated=ending == SWIGLU)
    pack(library, [packed])
    x = torch.randn(rows, 2 * inputs)
    torch.set_num_threads(threads)
    before = torch.randn(rows, packed.outputs) if ending == ADD else torch.full((rows, packed.outputs), torch.nan)
    found = apply(library, packed, x, ending, before.clone())
    x = rounded(x, dtype) if library.rollyard_dot() else x
    each = [F.linear(x.double(), rounded(s.weight, dtype).double(), s.bias.double() if bias else None) for s in sources]
    expected = F.silu(each[0]) * each[1] if ending == SWIGLU else torch.cat(each, dim=1)
    expected = expected + before if ending == ADD else expected
    torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-5)


def unpacked(packed: Packed) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The matrices that the panels hold, `[n, in]`, and the rest of the last panel."""
    panels, parts = len(packed.weight), 2 if packed.ending == SWIGLU else 1
    if packed.weight.dtype == torch.bfloat16:
        weight = packed.weight.view(panels, packed.inputs // 2, parts, -1, 2).permute(2, 0, 3, 1, 4)
    else:
        weight = packed.weight.view(panels, packed.inputs, parts, -1).permute(2, 0, 3, 1)
    weight = weight.reshape(parts, -1, packed.inputs)
    return list(weight[:, : packed.outputs]), weight[:, packed.outputs :]


@pytest.mark.parametrize("inputs", [2, 8, 510, 512, 514, 1030])  # packed 512 at a time, and 8 by 8 within these
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("panel", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_panels_hold_the_weights_as_they_are(inputs: int, source: torch.dtype, panel: torch.dtype) -> None:
    """Bit for bit: single ones, several that share panels, gated ones, all packed in one go by two threads."""
    library, generator = kernels(), torch.Generator().manual_seed(inputs)
    vector = int(library.rollyard_vector())
    torch.set_num_threads(2)
    layers, expected = [], []
    for outputs in ((64,), (1,), (7, 33, 1, 70), (45, 3, 18), (37, 37), (64, 64), (8, 8)):
        sources = [torch.nn.Linear(inputs, each, bias=False, dtype=source) for each in outputs]
        for each in sources:
            each.weight.copy_(torch.randn(each.weight.shape, generator=generator))
        for gated in (False, True) if len(outputs) == 2 else (False,):
            layers.append(Packed(sources, vector, panel, gated))
            layers[-1].weight.fill_(torch.nan)
            weights = [each.weight.to(panel) for each in sources]
            expected.append(weights if gated else [torch.cat(weights)])
    pack(library, layers)
    for layer, weights in zip(layers, expected, strict=True):
        found, rest = unpacked(layer)
        assert all(torch.equal(one, other) for one, other in zip(found, weights, strict=True))
        assert not rest.any()
        if len(weights) == 1:
            some = torch.randint(layer.outputs, (20,), generator=generator)
            assert torch.equal(layer.rows(some), weights[0][some])


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(2, 1000), st.integers(0, 2**32), st.booleans())
def test_it_draws_what_torch_draws(rows: int, vocab: int, seed: int, cut: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    if cut:
        logits[:, 1:][torch.rand(rows, vocab - 1, generator=generator) < 0.6] = -torch.inf
    noise = torch.rand(rows, generator=generator, dtype=torch.float64)
    noise[0] = 1 - 2.0**-53
    tokens, logprobs, near = drawn(logits, noise)
    expected, _, expected_near = by_inverse_cdf(logits, noise)
    sure = ~(near | expected_near)
    assert torch.equal(tokens[sure], expected[sure])
    torch.testing.assert_close(logprobs, logits.double().log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    assert logits.gather(1, tokens[:, None]).isfinite().all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 300, 599])
def test_logits_that_are_no_numbers_are_seen_in_the_logprob(bad: float, place: int) -> None:
    logits = torch.full((2, 600), -torch.inf)
    logits[:, 5] = 0.0
    logits[0, place] = bad
    tokens, logprobs, _ = drawn(logits, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert 0 <= int(tokens[0]) < 600 and logprobs[0].isnan()
    assert tokens[1] == 5 and logprobs[1] == 0.0


@pytest.mark.parametrize("half", [False, True])
@torch.no_grad()
def test_gates_far_from_zero(half: bool) -> None:
    """All of them are bfloat16 numbers, so a CPU that multiplies those rounds none."""
    gates = torch.tensor([0.0, 1, -1, 30, -30, 60, -60, 89.5, -89.5, 95, -95, 178, -178, 1000, -1000, 2.0**15, -(2.0**15)])
    sources = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    sources[0].weight.copy_(torch.tensor([[1.0, 0.0]]))
    sources[1].weight.copy_(torch.tensor([[0.0, 1.0]]))
    packed = Packed(sources, int(kernels().rollyard_vector()), torch.bfloat16 if half else torch.float32, gated=True)
    pack(kernels(), [packed])
    found = apply(kernels(), packed, torch.stack((gates, torch.ones_like(gates)), dim=1), SWIGLU)
    torch.testing.assert_close(found[:, 0].double(), F.silu(gates.double()), atol=1e-6, rtol=1e-5)


SHAPES = {  # heads of 16, which vectors of 8 and of 16 numbers divide
    "six queries a head": {"heads": 12, "kv_heads": 2, "width": 192},
    "biases everywhere": {"attention_bias": True, "mlp_bias": True},
    "one head": {"heads": 1, "kv_heads": 1, "width": 16},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("page_tokens", [1, 12, 16])
async def test_shapes_of_heads_and_pages(tmp_path: Path, shape: str, page_tokens: int) -> None:
    folder = tiny_folder(tmp_path, **SHAPES[shape])  # type: ignore[arg-type]
    reference = Reference(folder)
    requests = [ask(name, tuple(range(2, 4 + 5 * name)), 20, ignore_eos=True, temperature=1.0) for name in range(5)]
    async with serving(folder, kernels="native", page_tokens=page_tokens) as engine:
        written = await answers(engine, requests)
    for request in requests:
        one = written[request.id]
        expected = reference.logprobs(request.prompt_ids, one.token_ids)
        torch.testing.assert_close(torch.tensor(one.logprobs), expected, atol=1e-4, rtol=0)


def drawn(logits: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from rollyard.engine.embedded.native import choose

    return choose(kernels(), logits, noise, NEAR_EDGE)


def test_no_noise_draws_a_token_without_probability() -> None:
    logits = torch.full((2, 700), -torch.inf)
    logits[0, 690], logits[1, 3], logits[1, 5] = 2.0, 0.0, -100.0
    tokens, logprobs, _ = drawn(logits, torch.tensor([0.999999999, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [690, 3] and logprobs.tolist() == [0.0, 0.0]


async def test_a_rollout_is_bit_for_bit_the_same_in_any_batch(folder: Path) -> None:
    requests = [ask(name, tuple(range(2, 3 + 3 * name)), 20, temperature=1.0, ignore_eos=True) for name in range(9)]
    found = []
    for config in ({"slots": 1}, {"slots": 9}, {"slots": 5, "step_tokens": 7, "pages": 80}, {"share_prompts": False}):
        async with serving(folder, kernels="native", **config) as engine:
            written = await answers(engine, requests)
            found.append({name: (one.token_ids, one.logprobs) for name, one in written.items()})
    assert found[0] == found[1] == found[2] == found[3]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_no_packed_weight_outlives_an_update(tmp_path: Path, family: str, dtype: str) -> None:
    """Each parameter in turn is changed, loaded, and seen in the logprobs, which are those of the new parameters."""
    folder = tiny_folder(tmp_path, family=family, tied=False, layers=1)
    model = load(folder, torch.float32, torch.device("cpu"))
    tolerance = 1e-4 if dtype == "float32" else 0.05  # inputs too are rounded on some CPUs
    async with serving(folder, model=model, kernels="native", dtype=dtype) as engine:
        before = await scored(engine, 0)
        for number, (name, parameter) in enumerate(model.named_parameters(), start=1):
            with model.stamp.writing(), torch.no_grad():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number)) * 0.25)
            await change(engine, WeightVersion(number))
            after = await scored(engine, number)
            reference = Reference(folder)
            state = {each: value.to(getattr(torch, dtype)).float() for each, value in model.state_dict().items()}
            reference.model.load_state_dict(state, strict=False)
            exact = [reference.logprobs(PROMPT, tokens) for tokens, _ in after]
            for (_, logprobs), expected in zip(after, exact, strict=True):
                torch.testing.assert_close(torch.tensor(logprobs), expected, atol=tolerance, rtol=tolerance)
            assert after != before, f"{name} was changed and nothing moved"
            before = after


PROMPT = (5, 9, 17, 2, 30)


async def scored(engine: object, number: int) -> list[tuple[list[int], list[float]]]:
    requests = [ask(number * 10 + k, PROMPT, 6, seed=k, temperature=1.0, ignore_eos=True) for k in range(3)]
    written = await answers(engine, requests)  # type: ignore[arg-type]
    return [(written[request.id].token_ids, written[request.id].logprobs) for request in requests]


async def test_an_update_that_was_not_loaded_is_not_decoded_with(folder: Path) -> None:
    model = load(folder, torch.float32, torch.device("cpu"))
    async with serving(folder, model=model, kernels="native") as engine:
        await answers(engine, [ask(0, PROMPT)])
        with model.stamp.writing(), torch.no_grad():
            model.model.norm.weight.mul_(2)
        with pytest.raises(EngineLost, match="StaleWeights"):
            await answers(engine, [ask(1, PROMPT)])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_sole_user_gives_the_parameters_back(tmp_path: Path, dtype: str, tied: bool) -> None:
    folder = tiny_folder(tmp_path, tied=tied)
    requests = [ask(name, PROMPT[: name + 1], 8, temperature=1.0, ignore_eos=True) for name in range(5)]
    async with serving(folder, kernels="native", dtype=dtype) as engine:
        expected = {name: one.logprobs for name, one in (await answers(engine, requests)).items()}
    model = load(folder, torch.float32, torch.device("cpu"))
    async with serving(folder, model=model, kernels="native", dtype=dtype, sole=True) as engine:
        assert {name: one.logprobs for name, one in (await answers(engine, requests)).items()} == expected
        left = sum(parameter.numel() for parameter in model.parameters())
        assert left == (0 if tied else model.model.embed_tokens.weight.numel())
        with pytest.raises(WeightSyncError, match="gave its parameters back"):
            await change(engine, WeightVersion(1))
        again = [ask(10 + name, PROMPT[: name + 1], 8, seed=name * 1000, temperature=1.0, ignore_eos=True) for name in range(5)]
        written = await answers(engine, again)
        assert [written[each.id].logprobs for each in again] == list(expected.values())


@pytest.mark.parametrize("kernels", ["native", "plain"])
async def test_a_bfloat16_engine_under_float32_parameters(folder: Path, kernels: str) -> None:
    exact = Reference(folder)
    async with serving(folder, kernels=kernels, dtype="bfloat16") as engine:
        requests = [ask(name, PROMPT[: name + 1], 8, temperature=1.0, ignore_eos=True) for name in range(5)]
        written = await answers(engine, requests)
        assert engine.stats().copied_bytes > 0 and engine.cache_bytes > 0
    gaps = [
        (torch.tensor(written[each.id].logprobs) - exact.logprobs(each.prompt_ids, written[each.id].token_ids)).abs()
        for each in requests
    ]
    assert 0 < float(torch.cat(gaps).max()) < 0.2


def test_without_a_compiler_torch_decodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, pool = load(folder, torch.float32, torch.device("cpu")), PagePool(8, 16)

    def missing() -> None:
        raise KernelsUnavailable("there is no C++ compiler 'c++'")

    monkeypatch.setattr("rollyard.engine.embedded.check.kernels", missing)
    decoder = build(model, pool, EngineConfig())
    assert isinstance(decoder, PlainDecoder) and decoder.name == "plain (there is no C++ compiler 'c++')"
    with pytest.raises(ConfigError, match=r"engine\.kernels.*no C\+\+ compiler"):
        build(model, pool, EngineConfig(kernels="native"))


@pytest.mark.parametrize("script", ["exit 1", "echo nonsense > $OUT"])
def test_a_compiler_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    broken = tmp_path / "broken-cxx"
    broken.write_text(f'#!/bin/sh\nfor last; do [ "$prev" = -o ] && OUT=$last; prev=$last; done\n{script}\n')
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "cache"))
    with pytest.raises(KernelsUnavailable, match=r"broken-cxx|cannot be made or loaded"):
        compiling._made.__wrapped__()
    assert not list((tmp_path / "cache" / "kernels").glob("*/*"))


def test_a_compiler_that_is_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text").write_text("not a program")
    (tmp_path / "text").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "text"))
    with pytest.raises(KernelsUnavailable, match="cannot be made or loaded"):
        compiling._made.__wrapped__()


def test_no_code_is_loaded_from_a_folder_that_others_write_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path))
    with pytest.raises(KernelsUnavailable, match="not yours alone"):
        compiling._made.__wrapped__()


def test_a_broken_library_in_the_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that gives what was compiled before: what is looked at is when it is asked."""
    whole, compiler = Path(kernels()._name), tmp_path / "cxx"
    compiler.write_text(f'#!/bin/sh\nfor last; do [ "$prev" = -o ] && cp {whole} $last; prev=$last; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "first"))
    compiling._made.__wrapped__()
    (made,) = (tmp_path / "first" / "kernels").glob("*.so")
    library = tmp_path / "broken" / "kernels" / made.name
    library.parent.mkdir(parents=True)
    library.write_bytes(b"half a library")
    monkeypatch.setenv("ROLLYARD_CACHE", str(tmp_path / "broken"))
    assert int(compiling._made.__wrapped__().rollyard_vector()) == int(kernels().rollyard_vector())
    assert library.read_bytes() == whole.read_bytes()


def test_a_model_that_the_kernels_do_not_take_is_decoded_by_torch(tmp_path: Path) -> None:
    model = load(tiny_folder(tmp_path, heads=4, kv_heads=2, width=48), torch.float32, torch.device("cpu"))
    assert isinstance(build(model, PagePool(8, 16), EngineConfig()), PlainDecoder)  # heads of 12
    with pytest.raises(KernelsUnavailable, match="heads of a multiple of"):
        NativeDecoder(kernels(), model, PagePool(8, 16), torch.float32)
