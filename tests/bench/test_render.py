"""The page that shows results: benchmarks/render.py."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from rollyard.bench.result import Agreement, Difference, Figure, Load, Measured
from rollyard.bench.setting import Setting
from rollyard.bench.turns import Rounds

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(rate: float, bench: str = "engine", peer: str = "hf", workload: str = "8x8") -> str:
    one = (Measured(rate, (Figure("slots busy", 0.9),)), Measured(2 * rate, (Figure("slots busy", 0.9),)))
    rounds = Rounds(("rollyard", peer), (one, (Measured(100.0), Measured(100.0))), (Load(0.2, 1.5),) * 2)
    setting = Setting(Path("models/smollm2-135m"), workload, peer, "float32", 2, 2)
    agreement = Agreement(128, 120, (Difference(0, 3, 2e-5),))
    return json.dumps(asdict(setting.result(bench, "tokens/s", rounds.sides(), rounds, agreement))) + "\n"


def test_the_newest_line_of_each_benchmark_counts(render, tmp_path):
    (tmp_path / "2026-01-01.jsonl").write_text(line(100.0) + line(1.0, peer="vllm"))
    (tmp_path / "2026-01-02.jsonl").write_text(line(400.0))
    rows = render.newest(sorted(tmp_path.glob("*.jsonl")))
    assert [(row["sides"][1]["name"], row["sides"][0]["values"][0]) for row in rows] == [("hf", 400.0), ("vllm", 1.0)]


def test_the_table_has_ratio_ends_and_goal(render):
    text = render.render([json.loads(line(400.0)), json.loads(line(40.0, peer="vllm"))])
    assert "| 8x8 | float32 | tokens/s | 600 | Hugging Face `generate` | 100 | **6.00 (4.00 to 8.00)** | 3 |" in text
    assert "| 8x8 | float32 | tokens/s | 60 | vLLM | 100 | 0.60 (0.40 to 0.80) | 1 |" in text
    assert "greedy tokens alike: 120 of 128, then near ties (2e-05 nats)" in text
    assert "load average 0.2 to 1.5" in text and "rounds: 2" in text
    assert "### Training" not in text


def test_results_go_between_the_marks_of_the_page(render):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    once = render.insert(page, "first")
    assert "first" in once and render.insert(once, "second") == render.insert(page, "second")
    with pytest.raises(ValueError, match="marks"):
        render.insert("no marks", "x")


def test_every_goal_is_one_of_a_benchmark_that_exists(render):
    from rollyard.bench.choice import BENCHES

    for bench, workload, _, dtype in render.GOALS:
        assert workload in BENCHES[bench].workloads and dtype in ("float32", "bfloat16")
    script = (ROOT / "benchmarks" / "all.sh").read_text()
    for kind in BENCHES.values():
        for name in kind.workloads:
            assert name in script
