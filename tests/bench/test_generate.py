"""`bench engine` on a tiny model: against Hugging Face for real, against peers that get it wrong, and against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollyard.bench.generate import Variant, against_peer, bench, variants
from rollyard.bench.peer import PeerError, find
from rollyard.bench.result import Result
from rollyard.bench.setting import Setting
from rollyard.bench.workload import Shape
from rollyard.errors import ConfigError
from tests.bench.peers import script
from tests.tiny import tiny_folder

SHAPE = Shape(3, 2, (5, 9), 6, batch=4)
GENERATE = """
def generate(prompts, lengths, **asked):
    return {"seconds": 0.5, "ids": [[3] * length for length in lengths]}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), window=512)


def setting(model: Path, dtype: str = "float32", **options: object) -> Setting:
    return Setting(model, "mine", "fake", dtype, rounds=2, threads=1, options=options)


def quiet(line: str) -> None:
    pass


def figures(result: Result, side: int) -> dict[str, float]:
    return {figure.name: figure.value for figure in result.sides[side].figures}


async def test_beside_hugging_face_both_write_what_was_asked_and_agree(model):
    told: list[str] = []
    result = await against_peer(setting(model), SHAPE, find("hf"), told.append)
    assert result.unit == "tokens/s" and len(result.ratios) == 2
    assert result.agreement is not None and result.agreement.tokens == 4 * 32
    assert result.agreement.agreed == 128 or result.agreement.differences
    ours, theirs = result.sides
    assert result.ratios == tuple(a / b for a, b in zip(ours.values, theirs.values, strict=True))
    assert {"torch", "transformers"} <= set(theirs.versions)
    assert figures(result, 1)["slots busy"] == 1.0  # all of one length: nothing is computed for nothing
    assert figures(result, 0)["peak memory"] > 50 and figures(result, 1)["peak memory"] > 50
    assert told[-1].startswith("round 2/2, rollyard")  # the order turned round


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_greedy_tokens_that_are_not_the_models_end_it(model, tmp_path, dtype):
    with pytest.raises(PeerError, match="do not compute the same model"):
        await against_peer(setting(model, dtype), SHAPE, script(tmp_path, GENERATE), quiet)


@pytest.mark.parametrize(("dtype", "nats"), [("float32", 0.0009), ("bfloat16", 0.4)])
async def test_near_ties_are_reported(model, tmp_path, monkeypatch, dtype, nats):
    judges = set()

    def gap(judge, *asked):
        judges.add(judge.head_weight.dtype)
        return nats

    monkeypatch.setattr("rollyard.bench.generate.logit_gap", gap)
    result = await against_peer(setting(model, dtype), SHAPE, script(tmp_path, GENERATE), quiet)
    assert result.agreement is not None and result.agreement.agreed < 128
    assert {one.gap for one in result.agreement.differences} == {nats} and judges == {torch.float32}
    assert result.sides[1].values == (72.0, 72.0)  # 6 requests of 6 tokens in half a second
    assert result.sides[1].versions == {"fake": "1.0"}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ("{'seconds': 1.0, 'ids': [[3] * (n - 1) for n in lengths]}", "4 of them of another length"),
        ("{'seconds': 1.0, 'ids': [[3] * n for n in lengths[1:]]}", "wrote 3 completions"),
        ("{'ids': [[3] * n for n in lengths]}", "KeyError"),
        ("{'seconds': 'soon', 'ids': []}", "ValueError"),
    ],
)
async def test_a_peer_that_writes_something_else_is_found_out(model, tmp_path, answer, told):
    body = f"\ndef generate(prompts, lengths, **asked):\n    return {answer}\n"
    with pytest.raises(PeerError, match=told):
        await against_peer(setting(model, "bfloat16"), SHAPE, script(tmp_path, body), quiet)


async def test_a_peer_that_dies_in_a_round_ends_the_benchmark(model, tmp_path, monkeypatch):
    monkeypatch.setattr("rollyard.bench.generate.logit_gap", lambda *asked: 0.0)
    body = GENERATE.replace("    return", "    if asked['seed'] == 2: os._exit(3)\n    return")
    with pytest.raises(PeerError, match="exit code 3"):
        await against_peer(setting(model, "bfloat16"), SHAPE, script(tmp_path, body), quiet)


async def test_prompts_shared_or_not_differ_in_what_is_computed(model):
    shape = Shape(2, 4, (24, 24), 3)
    each = tuple(Variant(str(share), {"engine.share_prompts": share}, shape) for share in (True, False))
    result = await variants(setting(model), each, "s", lambda served: served.first_token_s, quiet)
    assert [side.name for side in result.sides] == ["True", "False"]
    assert figures(result, 1)["prompt tokens computed"] == 2 * 4 * 24 and figures(result, 1)["prompt tokens shared"] == 0
    computed, shared = (figures(result, 0)[f"prompt tokens {what}"] for what in ("computed", "shared"))
    assert computed < 2 * 4 * 24 / 2 and computed + shared == 2 * 4 * 24
    assert all(0 < value <= 60 for side in result.sides for value in side.values)


async def test_continuous_batching_keeps_more_slots_busy_than_static(model):
    shape = Shape(12, 1, (4, 8), 0)
    each = tuple(Variant(name, {"engine.batching": name, "engine.slots": 4}, shape) for name in ("continuous", "static"))
    result = await variants(setting(model), each, "tokens/s", lambda served: served.written.tokens_per_s, quiet)
    assert figures(result, 0)["slots busy"] > 1.2 * figures(result, 1)["slots busy"]


async def test_scheduling_is_a_part_of_the_step(model):
    each = tuple(Variant(f"{n}", {"engine.slots": 4}, Shape(n, 1, (4, 8), 8)) for n in (16, 4))
    result = await variants(setting(model), each, "tokens/s", lambda served: served.written.tokens_per_s, quiet)
    assert 0 < figures(result, 0)["scheduler share"] < 1


async def test_what_the_model_cannot_hold_is_a_mistake(tmp_path):
    small = tiny_folder(tmp_path, window=256)
    with pytest.raises(ConfigError, match="window"):
        await bench(Setting(small, "prefix", "", "float32", 1, 1), quiet)  # it needs 272 tokens
