"""`rollyard plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollyard.cli import main
from rollyard.layers import resolve

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
        (["--place.generate", "5"], "no placement has room"),
        (["--failures.joins", "2:+1"], "come or go"),
    ],
)
def test_mistakes_are_told(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *FIXED, *given]) == 2
    assert told in capsys.readouterr().err
