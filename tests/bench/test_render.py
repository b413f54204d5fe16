"""The page that shows results: benchmarks/render.py."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from rollyard.bench import tails
from rollyard.bench.placements import Choice
from rollyard.bench.result import Agreement, Difference, Figure, Load, Measured
from rollyard.bench.setting import Setting
from rollyard.bench.tails import Crowd
from rollyard.bench.turns import Rounds

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(
    rate: float,
    bench: str = "engine",
    peer: str = "hf",
    workload: str = "8x8",
    threads: int = 2,
    model: str = "m",
    **options: object,
) -> str:
    one = (Measured(rate, (Figure("slots busy", 0.9),)), Measured(2 * rate, (Figure("slots busy", 0.9),)))
    rounds = Rounds(("rollyard", peer), (one, (Measured(100.0), Measured(100.0))), (Load(0.2, 1.5),) * 2)
    setting = Setting(Path(model), workload, peer, "float32", 2, threads, options)
    agreement = Agreement(128, 120, (Difference(0, 3, 2e-5),))
    return json.dumps(asdict(setting.result("engine", "tokens/s", rounds.sides(), rounds, agreement))) + "\n"


def with_figure(workload: str, names: tuple[str, ...], side: str, *figures: tuple[str, float]) -> dict[str, object]:
    """A row of these sides; figures of the side, and of the second one where more are given."""
    row = json.loads(line(100.0, peer=names[1], workload=workload))
    plain = row["sides"][1]
    row["sides"] = [{**plain, "name": name, "figures": []} for name in names]
    for place, (figure, value) in zip((names.index(side), 1), figures, strict=False):
        row["sides"][place]["figures"] = [{"name": figure, "value": value, "unit": "u"}]
    return row


def test_the_newest_line_of_each_benchmark_counts(render, tmp_path):
    (tmp_path / "2026-01-01.jsonl").write_text(line(100.0) + line(1.0, peer="vllm"))
    (tmp_path / "2026-01-02.jsonl").write_text(line(400.0))
    rows = render.newest(sorted(tmp_path.glob("*.jsonl")))
    assert [(row["sides"][1]["name"], row["sides"][0]["values"][0]) for row in rows] == [("hf", 400.0), ("vllm", 1.0)]


def test_another_model_machine_or_number_of_threads_replaces_nothing(render, tmp_path):
    other = json.loads(line(7.0))
    other["machine"]["features"] = ["amx_bf16"]
    changed = (line(5.0, threads=4), line(6.0, model="n"), json.dumps(other) + "\n", line(8.0, **{"engine.slots": 2}))
    (tmp_path / "1.jsonl").write_text(line(400.0) + "".join(changed))
    rows = render.newest([tmp_path / "1.jsonl"])
    assert [row["sides"][0]["values"][0] for row in rows] == [400.0, 5.0, 6.0, 7.0]  # 8 has options of its own
    text = render.render(rows)
    assert text.count("#### Generation") == 4 and "2 threads\n" in text and "4 threads\n" in text and "### n on" in text


def test_the_table_has_ratio_ends_goal_and_whether_the_median_reached_it(render):
    text = render.render([json.loads(line(400.0)), json.loads(line(40.0, peer="vllm"))])
    assert "| 8x8 | float32 | tokens/s | 600 | Hugging Face `generate` | 100 | 6.00 (4.00 to 8.00) | 3 | reached | 2 |" in text
    assert "| 8x8 | float32 | tokens/s | 60 | vLLM | 100 | 0.60 (0.40 to 0.80) | 1 | **missed** | 2 |" in text
    assert "greedy tokens alike: 120 of 128, then near ties (2e-05 nats)" in text
    assert "load average 0.2 to 1.5" in text and "rounds: 2" in text
    assert "Training" not in text


@pytest.mark.parametrize(("value", "told"), [(24.9, "reached"), (25.1, "**missed**")])
def test_decode_is_held_to_the_time_outside_its_linear_layers(render, value, told):
    row = with_figure("decode", ("decode step", "its linear layers alone"), "decode step", ("outside linear layers", value))
    lines = render.table([row]).splitlines()
    assert f"| decode: outside linear layers | float32 | u | {value} |  |  |  | at most 25 | {told} | 2 |" in lines[3]
    assert "| 100 |  |  |  | 2 |" in lines[2]  # no ratio of a part and its whole


@pytest.mark.parametrize(("value", "told"), [(240.0, "reached"), (242.0, "**missed**")])
def test_memory_is_held_to_that_of_hugging_face(render, value, told):
    row = with_figure("ragged", ("rollyard", "hf"), "rollyard", ("peak memory", value), ("peak memory", 200.0))
    last = render.table([row]).splitlines()[-1]
    assert last.startswith(f"| ragged: peak memory | float32 | u | {value:.0f} | Hugging Face `generate` | 200 | 1.2")
    assert f"at most 1.2 | {told} |" in last
    assert len(render.table([with_figure("ragged", ("rollyard", "hf"), "rollyard")]).splitlines()) == 3  # a machine without /proc


@pytest.mark.parametrize(("value", "told"), [(0.0299, "reached"), (0.03, "**missed**")])
def test_scheduling_is_held_to_its_share_of_a_step(render, value, told):
    names = ("1024 queued", "64 queued", "256 queued", "256 running")
    row = with_figure("queue", names, "256 running", ("scheduler share", value))
    last = render.table([row]).splitlines()[-1]
    assert last.startswith("| queue: scheduler share, 256 running |") and f"| under 0.03 | {told} |" in last


def placements_row() -> dict[str, object]:
    expected = [{"formula": "a bound", "steps_per_s": 2.1, "share": 0.94, "least": 0.95, "most": None}]
    expected.append({"formula": "another", "steps_per_s": 2.0, "share": 1.0, "least": None, "most": None})
    shares = {"generating": 0.9, "slots": 0.8, "training": 0.3, "staleness": {"0": 25, "1": 75}}
    one = {"ratio": "3:1", "placement": "async", "rollover": "keep", "steps_per_s": 1.97, "tokens_per_s": 812.4, **shares}
    rewards = {"reward_first": 0.25, "reward_last": 0.5, "eval_first": 0.2, "eval_last": 0.4}
    real = {**one, **rewards, "steps": 24, "staleness_limit": 2, "load": {"before": 0.0, "after": 1.25}}
    about = {name: json.loads(line(1.0))[name] for name in ("machine", "versions")}
    load, work = {"before": 0.1, "after": 0.2}, Choice().work(1.0).settings()
    row = {"bench": "placements", "doubles": [{**one, "expected": expected}], "real": [real], "load": load, "options": {}}
    return {**row, **about, "work": work}


def test_placements_have_tables_of_their_own(render, tmp_path):
    changed = placements_row() | {"options": {"staleness": 4}}
    (tmp_path / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (placements_row(), changed)) + line(400.0))
    rows = render.newest([tmp_path / "1.jsonl"])
    assert [row["bench"] for row in rows] == ["placements", "engine"] and not rows[0]["options"]
    text = render.render(rows)
    assert "| 3:1 | async keep | 1.97 | 812 | 90% | 80% | 30% | 25%, 75% | 94.0% | 95%: **missed** | a bound: 2.1 |" in text
    assert "|  |  |  |  |  |  |  |  | 100.0% |  | another: 2 |" in text
    assert "| async keep | 2 | 24 | 1.97 | 812 | 90% | 30% | 25%, 75% | 0.250 to 0.500 | 0.200 to 0.400 | 1.2 |" in text
    assert "4 generation devices of 16 slots" in text and "#### Generation" in text


def test_tails_have_a_table_of_their_own(render, tmp_path):
    found = tails.Tail("tails put off, S 2", 8, 2, 1.0, 2.31, 0.48, 0.64, 0.1407, 10240, 1.0, 0.46, 0, 1501, 0.23)
    about = {name: json.loads(line(1.0))[name] for name in ("machine", "versions")}
    row = {"bench": "tails", "work": Crowd().settings(), "rows": [asdict(found)], "seconds": 1.0, "options": {}, **about}
    (tmp_path / "1.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row | {"options": {"engines": 8}}) + "\n")
    text = render.render(render.newest([tmp_path / "1.jsonl"]))
    assert "| 8 | 2 | 1 | tails put off, S 2 | 2.31 s | 48% | 64% | 0.141 | 1 | 0.46 | 0 | 1,501 | 23% |" in text
    assert "A step takes 4 ms and 0.5 ms for each that runs" in text and "10,240 to 10,240 members a run" in text


def test_results_go_between_the_marks_of_the_page(render):
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    once = render.insert(page, "first")
    assert "first" in once and render.insert(once, "second") == render.insert(page, "second")
    with pytest.raises(ValueError, match="marks"):
        render.insert("no marks", "x")


def test_every_goal_is_one_of_a_benchmark_that_exists(render):
    from rollyard.bench.choice import BENCHES

    for bench, workload, _, dtype in render.RATIOS:
        assert workload in BENCHES[bench].workloads and dtype in ("float32", "bfloat16")
    for most in render.MOST:
        assert most.workload in BENCHES["engine"].workloads
    script = (ROOT / "benchmarks" / "all.sh").read_text()
    for kind in BENCHES.values():
        for name in kind.workloads:
            assert name in script


def test_weight_sync_near_the_engine_has_a_goal(render):
    row = json.loads(line(100.0, workload="idle"))
    plain = row["sides"][0] | {"figures": []}
    figures = [{"name": render.NEAR_FIGURE, "value": 1.25, "unit": ""}, {"name": "bytes", "value": 5.0, "unit": ""}]
    row["sides"] = [plain | {"name": "broadcast", "figures": figures}, plain | {"name": "one flat broadcast"}]
    lines = render.sides_table(row).splitlines()
    assert lines[0] == "| | ms (least to most) | near the engine, times its bound | bytes | goal | |"
    assert lines[2].endswith("| 1.25 | 5 | 1.3 | reached |") and lines[3].endswith("|  |  |  |  |")
    figures[0]["value"] = 1.31
    assert render.sides_table(row).splitlines()[2].endswith("| 1.3 | **missed** |")
