"""`rollyard simulate`: where its scenario comes from, what it prints and leaves, and the same again for the same seed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollyard.cli import main
from rollyard.layers import RUNS, presets
from tests.traces import read_strictly

SMALL = ("simulate", "--preset", "small", "--steps", "3")


def said(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    assert main([str(each) for each in arguments]) == code
    found = capsys.readouterr()
    return found.err if code else found.out


def summary(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(capsys, *arguments, "--json"))
    return found


def explained(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, list[str]]:
    """Value and origin by option."""
    lines = said(capsys, "simulate", *arguments, "--explain").splitlines()
    return {words[0]: words[1:] for line in lines if (words := line.split()) and "." in words[0]}


def test_every_option_of_a_scenario_can_be_given_and_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    found = explained(capsys, "--preset", "small", "--mean-tokens", "50", "--price=2.5", "--costs.step_s", "0.01")
    assert found["workload.mean_tokens"][:3] == ["50.0", "command", "line"] and found["cluster.price"][0] == "2.5"
    assert found["rollout.group_size"][:3] == ["4", "preset", "small"] and found["costs.step_s"][0] == "0.01"
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    told = capsys.readouterr().out
    assert "--workload.growth" in told and "--failures.joins" in told and "--train.lr" in told and "cluster" in told


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (("--preset", "cluster", "--gpus", "128"), ("64", "64", "H100")),
        (("--preset", "cluster", "--gpus", "16xH200", "--place.generate", "4"), ("4", "12", "H200")),
        (("--preset", "cluster", "--gpus", "8", "--placement", "colocated", "--max-staleness", "0"), ("1", "8", "H100")),
        (("--model", "llama-8b", "--gpus", "9xA100-80", "--placement", "async"), ("4", "5", "A100-80")),
    ],
)
def test_so_many_devices_are_shared_out(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sizes: tuple[str, ...]
) -> None:
    found = explained(capsys, *arguments)
    assert tuple(found[name][0] for name in ("place.generate", "place.train", "cluster.hardware")) == sizes


def test_sizes_of_a_preset_that_do_not_fit_keep_its_proportion_of_devices(capsys: pytest.CaptureFixture[str]) -> None:
    few = ("simulate", "--preset", "cluster", "--steps", 2, "--prompts-per-step", 8, "--mean-tokens", 200)
    notes = summary(capsys, *few, "--gpus", "64xH100", "--engine.tensor_parallel_size", 4)["notes"]
    assert "devices are shared out: 8 engines of 4 devices, and 32 devices to train; --place.generate or" in notes[0]
    assert not summary(capsys, *few, "--gpus", "64xH100")["notes"]  # as it has them itself


def test_on_several_nodes_weights_go_by_broadcast_and_that_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing else reaches them; what a file or option says stands, and is refused."""
    asked = ("simulate", "--model", "qwen2.5-7b", "--model.dtype", "bfloat16", "--steps", 1, "--placement", "separate")
    (note,) = (each for each in summary(capsys, *asked, "--gpus", "16xH100", "--train.shard", "true")["notes"] if "nodes" in each)
    assert note == "on several nodes what travels goes by broadcast: give --weights.transport for another"
    assert not any("nodes" in each for each in summary(capsys, *asked, "--gpus", "8xH100", "--train.shard", "true")["notes"])
    told = said(capsys, *asked, "--gpus", "16xH100", "--weights.transport", "shared_memory", code=2)
    assert "the run lies on 2 nodes of 8 H100" in " ".join(told.split())


def test_a_number_format_that_nobody_named_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("simulate", "--model", "qwen2.5-1.5b", "--steps", 1, "--gpus", "4xH100")
    told = "arithmetic is in float32, as nothing else is said: give --train.precision bfloat16 and --engine.dtype bfloat16 for 16"
    assert any(each.startswith(told) for each in summary(capsys, *asked)["notes"])
    (half,) = (each for each in summary(capsys, *asked, "--train.precision", "bfloat16")["notes"] if "float" in each)
    assert "give --engine.dtype bfloat16 for" in half
    assert not any("float" in each for each in summary(capsys, *asked, "--model.dtype", "float32")["notes"])


def test_what_small_steps_do_to_parameters_of_16_bits_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Not of an adapter, whose own numbers are float32, nor where training is said to keep a finer copy."""
    asked = ("simulate", "--model", "qwen2.5-1.5b", "--steps", 1, "--gpus", "4xH100", "--model.dtype", "bfloat16")
    assert any("with no finer copy" in each for each in summary(capsys, *asked)["notes"])
    for other in (("--weights.what", "lora"), ("--costs.state_bytes", 16)):
        assert not any("finer copy" in each for each in summary(capsys, *asked, *other)["notes"])


def test_a_run_whose_activations_do_not_fit_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Our own trainer keeps them: 38 bytes a token, layer and hidden number beside parameters of 32 bits; 64 layers of 5,120."""
    (tmp_path / "run.toml").write_text('[train]\nshard = true\nprecision = "bfloat16"\n[weights]\ntransport = "checkpoint"')
    asked = ("simulate", tmp_path / "run.toml", "--model", "qwen2.5-32b", "--gpus", "24xH100", "--placement", "separate")
    more = ("--engine.tensor_parallel_size", 4, "--engine.kind", "vllm", "--engine.dtype", "bfloat16", "--steps", 1)
    kept = 8192 * 5120 * 64 * 38 / 1e9
    (told,) = (each for each in summary(capsys, *asked, *more)["notes"] if "activations" in each)
    assert told.startswith("our own trainer keeps activations") and f"activations {kept:.1f} GB, of 80.0 GB" in told
    for other in (("--costs.recompute", "true"), ("--batch.token_budget", 1024)):  # another trainer is said to train
        assert not any("activations" in each for each in summary(capsys, *asked, *more, *other)["notes"])


def test_what_is_printed_is_the_same_again_to_the_byte_for_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "rollyard", *SMALL, "--seed", "7", "--json"]
    texts = [subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout for _ in range(2)]
    assert texts[0] == texts[1] != said(capsys, *SMALL, "--seed", 8, "--json")
    found = json.loads(texts[0])
    assert found["steps"] == 3 and found["step_s"]["mean"] > 0 and found["notes"] == []


def test_only_a_folder_that_the_command_line_names_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.toml"
    file.write_text('[run]\nout = "mine"\noverwrite = true')
    said(capsys, *SMALL, file)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]
    assert "simulated run: there" in said(capsys, *SMALL, "--out", "there")
    assert {path.name for path in (tmp_path / "there").iterdir()} >= {"report.json", "metrics.jsonl", "trace.json"}
    report = json.loads((tmp_path / "there" / "report.json").read_text())
    trace = read_strictly(tmp_path / "there" / "trace.json")
    assert sum(map(len, trace.trained.values())) == report["trained"] and len(trace.trained) == report["steps"]
    assert "there exists already" in said(capsys, *SMALL, "--out", "there", code=2)
    said(capsys, *SMALL, "--out", "there", "--overwrite")


def test_the_config_of_a_run_is_a_scenario(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lengths = ("--workload.prompt_tokens", 12, "--steps", 2)
    hardware = ("--cluster.hardware", "cpu", "--cluster.bandwidth", 1e10, "--cluster.flops", 1e11, "--cluster.memory", 8e9)
    for preset in set(presets(RUNS)) - {"calculator"}:
        found = summary(capsys, "simulate", "--preset", preset, *lengths, *hardware)
        assert found["steps"] == 2 and found["notes"] == [] and not found["failed"]
    notes = summary(capsys, "simulate", "--preset", "sort", "--steps", 1, *hardware)["notes"]
    assert notes[:1] == ["prompts of 38 tokens, which is what the window leaves: give --workload.prompt_tokens for others"]
    assert "no environment plays" in said(capsys, "simulate", "--preset", "calculator", code=2)


def test_what_this_version_cannot_run_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    told = said(capsys, *SMALL, "--engine.tensor_parallel_size", "3")
    assert "this version of Rollyard could not run it as it is: engine.tensor_parallel_size" in told


def test_what_a_trace_does_not_say_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"group": group, "prompt_tokens": 9, "tokens": 30 - group, "finish": "length"} for group in range(5)]
    rows.append(rows[0] | {"finish": "error"})
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    bare = ("simulate", tmp_path / "bare.toml", "--trace", tmp_path / "a.jsonl", "--gpus", 2, "--placement", "separate")
    (tmp_path / "bare.toml").write_text('[model]\npath = "qwen2.5-7b"\ndtype = "bfloat16"\n[run]\nsteps = 2')
    finer, kept, pages, *notes = summary(capsys, *bare)["notes"]
    assert "no finer copy" in finer and "keeps activations" in kept
    assert pages.startswith("an engine has ") and "a run needs --engine.pages" in pages
    assert notes == [
        "the trace has 5 prompts for at least 64: they come again, in another order",
        "5 of the trace's 5 completions were cut, at 30 tokens at most: with a limit of 64 they would have gone on",
        "1 rollouts of the trace are left out: they failed, or have no token",
    ]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--preset", "large"), "there is no preset 'large'"),
        (("--preset", "small", "--gpus", "many"), "give such as 64"),
        (("--preset", "small", "--gpus", "2xH100", "--cluster.hardware", "A100-80"), "two kinds of device"),
        (("--preset", "small", "--gpus", "4xH1000"), "there is no device 'H1000'"),
        (("--preset", "small", "--model", "gpt-5"), "there is no model 'gpt-5'"),
        (("--preset", "small", "--mean-tokens", "1e9"), "not to be had"),
        (("--preset", "small", "--trace", "nowhere"), "nowhere cannot be read: No such file"),
        (("--preset", "small", "--trace", "none.jsonl"), "none.jsonl cannot be read: No such file"),
        (("--preset", "small", "--trace", "none.jsonl", "--mean-tokens", "9"), "workload.mean_tokens"),
        (("--preset", "small", "--calm"), "there is no option '--calm'"),
        (("none.toml",), "no such file"),
        ((), "no model is named"),
        (("--preset", "small", "--engine.pages", "15"), "keys and values of 240 tokens, and a prompt with its"),
        (
            ("--preset", "small", "--engine.pages", "100", "--workload.prompt_sigma", "1"),
            "1,600 tokens, and a prompt with its completion may have 8,192",
        ),
        (("--preset", "sort", "--workload.prompt_tokens", "64"), "leave no room in a window of 64"),
    ],
)
def test_mistakes_are_one_line_and_a_remedy(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told in said(capsys, "simulate", *arguments, code=2)
