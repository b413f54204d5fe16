"""`rollyard plan`."""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from rollyard import checks
from rollyard.cli import main
from rollyard.errors import ConfigError
from rollyard.layers import resolve
from rollyard.model.architecture import Architecture
from rollyard.plan import plan_command
from rollyard.plan.scenario import Scenario
from tests.tiny import tiny_folder

MODEL = "plan --model llama-1b --gpus 2xH100 --max-staleness 1 --top 1"
SMALL = f"{MODEL} --group-size 4 --prompts-per-step 4 --max-tokens 64 --mean-tokens 20".split()
FIXED = ["--engine.tensor_parallel_size", "1", "--weights.rollover", "keep", "--rollout.oversample", "0", "--engine.slots", "16"]


def test_a_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    assert main([*SMALL, *FIXED, "--price", "2", "--json", "--out", str(path)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    best = found["choices"][0]
    assert best["cost"] == pytest.approx(2 * 2 / 3600 * best["ran"]["step_s"])
    assert found["simulated"] == found["points"] - sum(each["count"] for each in found["refused"]) == 5
    assert f"rollyard run {path}" in err
    config = resolve(file=path, environment={}, overrides={"prompts.task": "sort"}).config
    for name, value in best["options"].items():
        section, _, leaf = name.partition(".")
        assert getattr(getattr(config, section), leaf) == value
    assert "simulation" not in err  # how far it is is for a terminal
    assert (config.model.dtype, config.train.precision, config.engine.dtype) == ("float32", "bfloat16", "bfloat16")
    assert "caution" not in err
    held = 1_235_814_400 * 4 / 1e9
    told = f"# a device that trains holds weights {held:.1f} GB, gradients and optimizer {3 * held:.1f} GB, activations "
    assert told in path.read_text()
    assert config.forecast.step_s == pytest.approx(best["ran"]["step_s"], rel=1e-3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--gpus", "many"], "no number of devices"),
        (["--top", "0"], "--top"),
        (["--gpus", "2xA9"], "no device"),
        (["--model", "nowhere"], "nowhere"),
        (["--mean-tokens", "80"], "mean"),
        (["--model", "llama-70b"], "GB"),
        (["--gpus", ""], "no number of devices"),
        (["--max-staleness", "99999999999999999999"], "--max-staleness: with 99,999,999,999,999,999,999 there are more than"),
        (["--rollout.max_staleness", "99999999999"], "rollout.max_staleness: with 99,999,999,999 there are more than"),
        (["--place.generate", "5"], "no placement has room"),
        (["--failures.joins", "2:+1"], "come or go"),
        (["--failures.node_hours", "1e-5"], "no choice is possible: the run ends after"),
        (["--out", "nowhere/plan.toml"], "there is no folder nowhere"),
        (["--out", "."], "is a folder"),
    ],
)
def test_mistakes_are_told(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *FIXED, *given]) == 2
    assert told in capsys.readouterr().err


def test_a_trace_is_in_the_place_of_a_preset_s_lengths(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"group": 0, "prompt_tokens": 3, "tokens": 5}\n')
    assert main(["plan", "--preset", "small", "--gpus", "1xcpu", "--max-staleness", "0", "--trace", str(path), "--json"]) == 0


def test_a_config_that_cannot_be_written_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan_command, "write_file", full)
    assert main([*SMALL, *FIXED, "--out", str(tmp_path / "plan.toml")]) == 2
    assert "--out: cannot be written: [Errno 28]" in capsys.readouterr().err


def test_where_the_config_goes_is_looked_at_before_anything_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Mock()
    monkeypatch.setattr(plan_command, "Planner", planner)
    assert main([*SMALL, "--out", "nowhere/plan.toml"]) == 2
    assert not planner.called


def test_what_a_preset_sets_is_searched_and_what_the_user_gives_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Mock(side_effect=ConfigError("enough", where="here", remedy="none"))
    monkeypatch.setattr(plan_command, "Planner", planner)
    assert main(["plan", "--preset", "cluster", "--gpus", "128xH100", "--train.shard", "false"]) == 2
    space = planner.call_args.args[0]
    assert "place.generate" not in space.pinned and "rollout.max_staleness" not in space.pinned
    assert "train.shard" in space.pinned and "rollout.group_size" in space.pinned
    assert any(point.devices == 128 for point in space.points())


def test_parameters_of_16_bits_are_for_who_asks_for_them_and_their_price_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.toml"
    assert main([*SMALL, *FIXED, "--place.placement", "separate", "--model.dtype", "bfloat16", "--out", str(path)]) == 0
    told = "caution: parameters and AdamW's moments are bfloat16, with no finer copy"
    assert told in capsys.readouterr().err and f"# {told}" in path.read_text()
    config = resolve(file=path, environment={}, overrides={"prompts.task": "sort"}).config
    assert (config.model.dtype, config.train.precision, config.engine.dtype) == ("bfloat16", "model", "model")


def base_of(monkeypatch: pytest.MonkeyPatch, *asked: str) -> Scenario:
    """What choices have in common."""
    planner = Mock(side_effect=ConfigError("enough", where="here", remedy="none"))
    monkeypatch.setattr(plan_command, "Planner", planner)
    assert main([*SMALL, *asked]) == 2
    found: Scenario = planner.call_args.args[0].base
    return found


def test_number_formats_are_those_that_training_takes_no_harm_from(monkeypatch: pytest.MonkeyPatch) -> None:
    def formats(*asked: str) -> tuple[str, str, str]:
        found = base_of(monkeypatch, *asked)
        return found.model.dtype, found.train.precision, found.engine.dtype

    assert formats() == formats("--model.dtype", "float32") == ("float32", "bfloat16", "bfloat16")
    assert formats("--train.precision", "model", "--engine.dtype", "float32") == ("float32", "model", "float32")
    assert formats("--model.dtype", "bfloat16") == ("bfloat16", "model", "model")
    assert formats("--weights.what", "lora") == ("bfloat16", "model", "model")  # what is trained is float32 anyway
    assert formats("--gpus", "2xcpu", "--cluster.flops", "1e11", "--cluster.bandwidth", "1e10") == ("float32", "model", "model")


def test_memory_is_that_of_the_trainer_that_runs_what_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """4 bytes of a parameter and 12 of its state; activations are kept, and so is a copy of what is broadcast."""
    found = base_of(monkeypatch)
    assert not found.costs.recompute and found.costs.sent_copy
    monkeypatch.undo()
    large = ["--model", "llama-8b", "--place.placement", "separate", "--place.train", "1", "--place.generate", "1"]
    assert main([*SMALL, *FIXED, *large]) == 2
    kept = 8192 * 4096 * 32 * (2 * 4 + 15 * 2) / 1e9
    told = " ".join(capsys.readouterr().err.split())
    assert f"weights 32.1 GB, gradients and optimizer 96.4 GB, activations {kept:.1f} GB, of 80.0 GB" in told
    few = ["--gpus", "16xH100", *large[:4], "--place.train", "8", "--place.generate", "8", "--batch.token_budget", "10000"]
    assert main([*SMALL, *FIXED, *few, "--weights.transport", "broadcast"]) == 2
    assert "a copy that travels 32.1 GB" in " ".join(capsys.readouterr().err.split())
    assert main([*SMALL, *FIXED, *few]) == 0  # and else goes another way
    assert "caution: weights go by a disk that all nodes share" in capsys.readouterr().err


def test_activations_are_computed_again_where_training_does_not_fit_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 72B and 8,192 tokens all would be 204 GB a device, however many share the rest."""
    large = ["--gpus", "64xH100", "--model", "qwen2.5-72b"]
    assert not base_of(monkeypatch).train.recompute
    assert base_of(monkeypatch, *large).train.recompute
    assert not base_of(monkeypatch, *large, "--train.recompute", "false").train.recompute
    assert base_of(monkeypatch, "--train.recompute", "true").train.recompute


def written(folder: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A plan for a model that has a longer window than a micro-batch by default, on two processes of this machine."""
    model, path = tiny_folder(folder, window=32768, chat=True), folder / "plan.toml"
    (folder / "judge.py").write_text("def score(prompt, completion):\n    return float(len(completion) % 3)\n")
    (folder / "prompts.jsonl").write_text("".join(f'{{"prompt": "say {number}"}}\n' for number in range(8)))
    asked = f"plan --model {model} --gpus 2xcpu --max-staleness 0 --place.placement separate --group-size 2 --prompts-per-step 2"
    asked += f" --max-tokens 16 --prompt-tokens 16 --engine.slots 4 --weights.limit_s 60 --out {path}"
    asked += f" --prompts.path {folder / 'prompts.jsonl'} --reward.function {folder / 'judge.py'}:score"
    asked += " --cluster.bandwidth 1e10 --cluster.flops 1e11"
    assert main(asked.split()) == 0
    told = capsys.readouterr().err
    assert f"rollyard run {path}" in told and "cannot be run" not in told
    return path


def test_a_run_takes_what_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve(file=written(tmp_path, capsys), environment={}).config
    assert config.engine.window == config.batch.token_budget == 8192
    checks.check(config, Architecture.from_folder(Path(config.model.path)))


@pytest.mark.slow
def test_what_is_written_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = written(tmp_path, capsys), tmp_path / "run"
    assert main(["run", str(path), "--steps", "2", "--out", str(out), "--view", "quiet"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["steps"] == 2 and report["placement"] == "separate" and report["forecast"]
