"""`bench step` on a tiny model, with a peer that has the right prompts, or not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rollyard.bench import step
from rollyard.bench.peer import PeerError
from rollyard.bench.result import machine
from rollyard.bench.setting import Setting
from rollyard.model.tokenizer import Tokenizer
from rollyard.reward.function import load_reward
from tests.bench.peers import script
from tests.tiny import tiny_folder

# The tiny model knows no capital letters.
pytestmark = pytest.mark.filterwarnings("ignore:the tokenizer does not know:RuntimeWarning")

STEP = """
import json
number = 0

def step():
    global number
    ids = json.load(open({prompts!r}))[8 * number : 8 * number + 8]
    number += 1
    return {{"seconds": 2.0, "generation_s": 0.5, "training_s": 1.25, "reward": 0.1,
            "lengths": {lengths}, "prompts": [row for row in ids for _ in range(8)]}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("model"), chat=True)


def peer(folder: Path, model: Path, *, reverse: bool = False, lengths: str = "[64] * 64"):
    """A TRL that knows the prompts it should have been given."""
    step.write_prompts(folder / "prompts.jsonl", 32)
    tokenizer = Tokenizer(model)
    texts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    ids = [tokenizer.chat([{"role": "user", "content": text}]) for text in texts]
    (folder / "ids.json").write_text(json.dumps(ids[::-1] if reverse else ids))
    return script(folder, STEP.format(prompts=str(folder / "ids.json"), lengths=lengths))


def setting(model: Path, workload: str) -> Setting:
    return Setting(model, workload, "trl", "float32", rounds=2, threads=1)


async def test_one_step_each_in_turn(model, tmp_path):
    told: list[str] = []
    result = await step.measure(setting(model, "fixed"), peer(tmp_path, model), told.append)
    ours, theirs = result.sides
    assert result.unit == "s" and theirs.values == (2.0, 2.0)
    assert result.ratios == tuple(2.0 / value for value in ours.values)
    mine = {figure.name: figure.value for figure in ours.figures}
    assert mine["tokens of a completion"] == 64 and mine["completions"] == 64
    assert 0 < mine["generation"] + mine["training"] <= ours.spread.most
    assert mine["groups of equal rewards"] < 8
    assert [line.split(":")[0] for line in told[-2:]] == ["round 2/2, fake", "round 2/2, rollyard"]


async def test_completions_end_by_themselves_in_natural(model, tmp_path):
    result = await step.measure(setting(model, "natural"), peer(tmp_path, model, lengths="[9] * 64"), lambda line: None)
    mine = {figure.name: figure.value for figure in result.sides[0].figures}
    assert 1 <= mine["tokens of a completion"] < 64  # a random model of 50 tokens ends now and then


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"reverse": True}, "did not have the same prompts"),
        ({"lengths": "[64] * 63"}, "63 completions in a step instead of 64"),
        ({"lengths": "[64] * 63 + [1]"}, "tokens a completion instead of 64"),
        ({"lengths": "[]"}, "ZeroDivisionError"),
    ],
)
async def test_unequal_work_is_found_out(model, tmp_path, change, told):
    with pytest.raises(PeerError, match=told):
        await step.measure(setting(model, "fixed"), peer(tmp_path, model, **change), lambda line: None)


@pytest.mark.parametrize(
    ("features", "precision"),
    [
        (("avx2",), "model"),
        (("avx2", "avx512f"), "model"),  # oneDNN emulates it there
        (("avx2", "avx512f", "avx512_bf16"), "bfloat16"),
        (("avx2", "avx512f", "amx_bf16"), "bfloat16"),
        (("asimd",), "model"),
        (("asimd", "bf16"), "bfloat16"),
    ],
)
def test_the_trainer_multiplies_bfloat16_where_the_cpu_does(model, tmp_path, monkeypatch, features, precision):
    monkeypatch.setattr(step, "machine", lambda: replace(machine(), features=features))
    config = step.config_of(replace(setting(model, "fixed"), dtype="bfloat16"), tmp_path / "prompts", tmp_path / "run")
    assert config.train.precision == precision and config.engine.dtype == "bfloat16"


def test_the_reward_is_one_function_for_both_sides():
    reward = load_reward(f"{step.REWARD}:sums")
    assert reward("", "it is 46", answer="46") == pytest.approx(1 + 0.1 * 2 / 8)
    assert reward("", "46 or 47", answer="46") == pytest.approx(0.1 / 8)
    assert reward("", "", answer="46") == 0.0
