"""Who needs what of a tensor: by hand, and that nothing is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollyard.errors import ConfigError
from rollyard.model.architecture import Architecture
from rollyard.model.folder import load
from rollyard.model.transformer import CausalLM
from rollyard.types import Answer, Manifest, Slice, WeightVersion
from rollyard.weights import canary, probe
from rollyard.weights.flat import model_infos
from rollyard.weights.shares import check_divides, shares
from rollyard.weights.workers import WorkersPublisher
from tests.tiny import tiny_folder


def shape(heads: int = 4, kv_heads: int = 2, vocab: int = 100, feed_forward: int = 24, **more: bool) -> Architecture:
    return Architecture("qwen3", vocab, 16, 1, heads, kv_heads, 8, feed_forward, 64, **more)


def test_by_hand() -> None:
    """100 words become 128, so the second of two workers has 36 of them; two key-value heads of 8 for two, or for four."""
    arch = shape(mlp_bias=True, output_bias=True)
    infos = model_infos(CausalLM(arch, torch.float32, "meta"))
    found = {info.name: (one, other) for info, one, other in zip(infos, *shares(infos, arch, 2), strict=True)}
    layer = "model.layers.0."
    assert found["model.embed_tokens.weight"] == found["lm_head.weight"] == (Slice(0, 0, 64), Slice(0, 64, 100))
    assert found[layer + "self_attn.q_proj.weight"] == (Slice(0, 0, 16), Slice(0, 16, 32))
    assert found[layer + "self_attn.k_proj.weight"] == (Slice(0, 0, 8), Slice(0, 8, 16))
    assert found[layer + "self_attn.o_proj.weight"] == (Slice(1, 0, 16), Slice(1, 16, 32))
    assert found[layer + "mlp.up_proj.bias"] == (Slice(0, 0, 12), Slice(0, 12, 24))
    assert found[layer + "mlp.down_proj.weight"] == (Slice(1, 0, 12), Slice(1, 12, 24))
    for whole in ("self_attn.o_proj.bias", "self_attn.q_norm.weight", "input_layernorm.weight", "mlp.down_proj.bias"):
        assert found[layer + whole] == (None, None)
    of_four = shares(infos, arch, 4)
    keys = [each[[info.name for info in infos].index(layer + "self_attn.v_proj.weight")] for each in of_four]
    assert keys == [Slice(0, 0, 8), Slice(0, 0, 8), Slice(0, 8, 16), Slice(0, 8, 16)]


@pytest.mark.parametrize(
    ("made", "workers", "told"),
    [
        (shape(heads=6, kv_heads=3), 4, r"6 heads cannot be divided among 4 workers \(use 1\)"),
        (shape(heads=8, kv_heads=8, feed_forward=12), 8, r"12 columns of the feed-forward .* \(use 1 or 2 or 4\)"),
        (shape(heads=3, kv_heads=3, feed_forward=12), 3, r"128 rows of the padded vocabulary .* 3 workers \(use 1\)"),
        (shape(heads=12, kv_heads=4), 6, r"4 key-value heads cannot be divided among 6 workers"),
    ],
)
def test_what_cannot_be_divided_is_refused(made: Architecture, workers: int, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"engine.tensor_parallel_size: {told}"):
        check_divides(made, workers)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 300), st.sampled_from([1, 2, 4, 8]))
def test_every_number_has_somebody_who_needs_it(repeats: int, kv_heads: int, vocab: int, workers: int) -> None:
    arch = shape(kv_heads * repeats, kv_heads, vocab, 8 * repeats)
    infos = model_infos(CausalLM(arch, torch.float32, "meta"))
    try:
        found = shares(infos, arch, workers)
    except ConfigError:
        return
    for number, info in enumerate(infos):
        parts = [each[number] for each in found]
        if None in parts:
            assert parts == [None] * workers
            continue
        (dim,) = {part.dim for part in parts if part is not None}
        needed = {index for part in parts if part is not None for index in range(part.start, part.end)}
        assert needed == set(range(info.shape[dim]))


class Noting:
    """A publisher that offers two tensors."""

    def __init__(self) -> None:
        self.told: list[object] = []

    async def publish(self, version: WeightVersion, engines: list[str]) -> Manifest:
        self.told.append(engines)
        return Manifest(version, tuple(model_infos(CausalLM(shape(), torch.float32, "meta"))), 7, "here")

    again = publish

    def taken(self, engine: str, version: WeightVersion) -> None:
        self.told.append(engine)

    def lost(self, engine: str) -> None:
        self.told.append(engine)


async def test_workers_are_the_engines_of_a_transport() -> None:
    noting = Noting()
    publisher = WorkersPublisher(noting, shape(), 2)  # type: ignore[arg-type]
    manifest = await publisher.publish(WeightVersion(1), ["a", "b"])
    assert (manifest.bytes_copied, manifest.source, len(manifest.shares)) == (7, "here", 2)
    assert all(len(each) == len(manifest.tensors) for each in manifest.shares)
    publisher.taken("a", WeightVersion(1))
    publisher.lost("b")
    assert noting.told == [["a.0", "a.1", "b.0", "b.1"], "a.0", "a.1", "b.0", "b.1"]


def test_the_part_of_one_worker_that_stays_behind_is_named(tmp_path: Path) -> None:
    """The engine's answers are those of moved weights, but for the second half of one matrix."""
    model = load(tiny_folder(tmp_path, tied=False, heads=4, kv_heads=2, layers=1))
    infos = model_infos(model)
    by_name = dict(zip((info.name for info in infos), zip(*shares(infos, model.architecture, 2), strict=True), strict=True))
    parts = {name: [part for part in each if part is not None] for name, each in by_name.items() if None not in each}
    name, kept = "model.layers.0.self_attn.o_proj.weight", canary.keep(model)
    moved = canary.move(model, kept, kept, 1, 1e-3, parts)
    weight = dict(model.named_parameters())[name].detach()
    away = weight.clone()
    with model.stamp.writing():
        weight[:, 32:] = kept[name][:, 32:]
    stale = probe.table(model)
    with model.stamp.writing():
        weight.copy_(away)
    answers = [Answer(token, float(stale[row, token])) for row, token in enumerate(stale.argmax(dim=1).tolist())]
    assert probe.distance(answers, moved.table) > 1e-3
    assert canary.left_behind(model, kept, answers, 1e-4, parts) == (f"{name} in worker 1",)
    assert canary.left_behind(model, kept, answers, 1e-4) == ()
    assert torch.equal(weight, away)
