"""A library that computes one thing wrongly is not decoded with."""

from __future__ import annotations

from ctypes import CDLL, c_int
from pathlib import Path

import pytest
import torch

from rollyard.config import EngineConfig
from rollyard.engine.embedded import check
from rollyard.engine.embedded import compile as compiling
from rollyard.engine.embedded.compile import KernelsUnavailable, kernels
from rollyard.engine.embedded.decoder import build
from rollyard.engine.embedded.pages import PagePool
from rollyard.engine.embedded.plain import PlainDecoder
from rollyard.errors import ConfigError
from rollyard.model.folder import load
from tests.compiler import needs_compiler
from tests.tiny import tiny_folder

pytestmark = [needs_compiler, pytest.mark.timeout(240)]  # the first of them compiles

LAYERS, DRAWS = "linear layers in float32", "draws of tokens"
PASS, HALF_PASS = "a forward pass in float32", "a forward pass in bfloat16"
# What is broken -> a piece of the source, what stands there instead, and what the check says.
BREAKS = {
    "a tile of several rows": ("sum[m][0] += s * a;", "sum[m][0] += m == 2 && BROKEN(1) ? 0 * s * a : s * a;", LAYERS),
    "the end of a row of inputs": ("for (; k < in; k++) step<M>", "for (; k < in - BROKEN(1); k++) step<M>", LAYERS),
    "packing the second part": ("std::min(INPUTS, in - k);", "std::min(INPUTS, in - k) - (k && BROKEN(2));", LAYERS),
    "the gate": ("vec gated = a / ", "vec gated = (1.0f - BROKEN(1)) * a / ", LAYERS),
    "the sum of squares": ("for (; i < n; i++) squares +=", "for (; i < n - BROKEN(1); i++) squares +=", PASS),
    "positions": ("x[i + n / 2] = (b *", "x[i + n / 2] = (BROKEN(1) ? b : b *", PASS),
    "the sum of a softmax": ("(total(sum) - tail);", "(total(sum) * (1.0f + BROKEN(1)) - tail);", PASS),
    "the second page": ("table[first / m.page_tokens]", "table[BROKEN(1) ? 0 : first / m.page_tokens]", PASS),
    "values": ("sum[g][c] += s * v[c];", "sum[g][c] += (g == 1 && BROKEN(1) ? 1.5f * s : s) * v[c];", PASS),
    "one query alone": ("default: attend<1>", "default: if (!BROKEN(1)) attend<1>", PASS + ", 1 queries to a key"),
    "bfloat16 pages": ("attend_token<bf16>(m, l, b, t, head)", "attend_token<bf16>(m, l, b, BROKEN(1) ? 0 : t, head)", HALF_PASS),
    "norms of queries": ("if (l.q_norm) rms_norm", "if (l.q_norm && !BROKEN(1)) rms_norm", PASS + ", 7 queries to a key"),
    "the second level of a draw": ("if (sum > target) break;", "if (sum > target * (1 + BROKEN(1))) break;", DRAWS),
    "the logprob of a draw": ("- std::log(all);", "- std::log(all + BROKEN(1));", DRAWS),
}  # fmt: skip


@pytest.fixture(scope="module")
def breakable(tmp_path_factory: pytest.TempPathFactory) -> CDLL:
    """The kernels with a switch: `rollyard_broken` says which of BREAKS is on, 0 none of them."""
    source = compiling.SOURCE.read_text()
    for number, (before, after, _) in enumerate(BREAKS.values(), start=1):
        assert source.count(before) == 1, before
        source = source.replace(before, after.replace("BROKEN(", f"BROKEN({number}, "))
    switch = 'extern "C" { int rollyard_broken = 0; }\n#define BROKEN(number, value) (rollyard_broken == number ? value : 0)\n'
    file = tmp_path_factory.mktemp("broken") / "decoder.cpp"
    file.write_text(switch + source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "SOURCE", file)
        patch.setattr(compiling, "FLAGS", tuple(flag.replace("-O3", "-O1") for flag in compiling.FLAGS))
        return compiling._made.__wrapped__()


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_computed_wrongly_is_named(breakable: CDLL, name: str) -> None:
    switch = c_int.in_dll(breakable, "rollyard_broken")
    switch.value = list(BREAKS).index(name) + 1
    assert check.disagreement.__wrapped__(breakable).startswith(BREAKS[name][2])
    switch.value = 0
    assert not check.disagreement.__wrapped__(breakable)


def test_torch_decodes_where_the_kernels_are_wrong(breakable: CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "kernels", lambda: breakable)
    monkeypatch.setattr(check, "disagreement", check.disagreement.__wrapped__)
    c_int.in_dll(breakable, "rollyard_broken").value = len(BREAKS)
    model, pool = load(tiny_folder(tmp_path), torch.float32, torch.device("cpu")), PagePool(8, 16)
    try:
        decoder = build(model, pool, EngineConfig())
        assert isinstance(decoder, PlainDecoder)
        assert decoder.name == "plain (the compiled kernels give other numbers than torch in draws of tokens)"
        with pytest.raises(ConfigError, match=r"engine\.kernels.*draws of tokens"):
            build(model, pool, EngineConfig(kernels="native"))
        with pytest.raises(KernelsUnavailable, match="draws of tokens"):
            check.checked()
    finally:
        c_int.in_dll(breakable, "rollyard_broken").value = 0


@pytest.mark.parametrize("macros", [(), ("ROLLYARD_DOT",)])
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_that_are_right_pass(macros: tuple[str, ...], threads: int) -> None:
    torch.set_num_threads(threads)
    before = torch.get_rng_state()
    assert check.disagreement.__wrapped__(kernels(*macros)) == ""
    assert torch.equal(torch.get_rng_state(), before)  # a run's random numbers are its own


def test_they_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    check.checked()
    monkeypatch.setattr(check, "_layers_agree", None)
    assert check.checked() is kernels()
