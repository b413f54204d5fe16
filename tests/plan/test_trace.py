"""Lengths of a recorded run: what it exports is what is simulated, and what is no trace is told by line and field."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollyard.cli import main
from rollyard.errors import ConfigError
from rollyard.inspect.export import export
from rollyard.inspect.source import Lives, Source
from rollyard.journal.folder import RunFolder
from rollyard.plan.trace import lengths_of, read_trace
from rollyard.plan.workload import LONGEST, Recorded
from rollyard.watch.read import read_report
from tests import small
from tests.inspect.runs import write_run
from tests.plan.test_workload import scenario

SELECT = (
    "SELECT p.group_id, c.member, c.tokens, length(p.token_ids) / 4, c.finish FROM completions c JOIN prompts p USING (group_id)"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("trace") / "run"
    small.learnt(small.config(folder, run__steps=1, prompts__held_out=0, warmup__steps=1))
    return RunFolder(folder)


def lines(path: Path, *records: object) -> Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in records))
    return path


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_what_a_real_run_exports_comes_back_prompt_by_prompt(run: RunFolder, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"all.{suffix}"
    with Source(run, Lives()) as source:
        count = export(source, path, overwrite=False)
        rows = list(source.rows(SELECT))
    found = read_trace(path)
    assert found.completions == count == len(rows) > 0 and found.left_out == 0
    assert found.cut == sum(finish != "stop" for *_, finish in rows)
    lengths = lengths_of(scenario(workload__trace=str(path)))
    for group, member, tokens, prompt, finish in rows:  # what was cut would have gone on
        assert lengths.completion(group, member, 0) == tokens + (finish != "stop") and lengths.prompt(group) == prompt


def test_a_run_simulated_with_its_own_options_and_lengths_writes_what_it_wrote(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(run.config), "--trace", str(run.path), "--json"]) == 0
    found, wrote = json.loads(capsys.readouterr().out), read_report(run.report)
    assert found["lengths"] == asdict(wrote.lengths) and found["steps"] == wrote.steps
    assert all(note.startswith("without effect in this simulation: ") for note in found["notes"])


def test_a_few_fields_suffice(tmp_path: Path) -> None:
    told = [
        {"group": 7, "prompt_tokens": 3, "tokens": 90},
        "",
        {"group": 2, "prompt_tokens": 5, "tokens": 10, "finish": "length"},
    ]
    told += [{"group": 7, "prompt_tokens": 3, "tokens": 20}, {"group": 7, "prompt_tokens": 3, "tokens": 0}]
    told += [{"group": 2, "prompt_tokens": 5, "tokens": 8, "finish": "error"}]
    path = lines(tmp_path / "few.jsonl", *told)
    found = read_trace(path)
    assert found == Recorded(((11,), (90, 20)), (5, 3), 1, 10, 2)
    table = pa.table({"group": [7, 2, 7], "prompt_tokens": [3, 5, 3], "tokens": [90, 10, 20]})
    pq.write_table(table, tmp_path / "few.parquet")
    assert read_trace(tmp_path / "few.parquet").groups == ((10,), (90, 20)), "all ended by themselves where nobody says"
    wide = table.append_column("finish", pa.array(["stop", "length", "error"], pa.large_string()))
    wide = wide.drop_columns("tokens").append_column("token_ids", pa.array([[1] * 90, [1], [1]], pa.large_list(pa.int64())))
    pq.write_table(wide, tmp_path / "wide.parquet")
    assert read_trace(tmp_path / "wide.parquet") == Recorded(((2,), (90,)), (5, 3), 1, 1, 1)
    lengths = lengths_of(scenario(workload__trace=str(path), workload__growth=0.1))
    assert [lengths.completion(1, member, 0) for member in range(4)] == [90, 20, 90, 20]  # begins again
    assert lengths.completion(1, 1, 3) == round(20 * 1.1**3) and lengths.completion(1, 1, 9999) == LONGEST
    endless = lengths_of(scenario(workload__trace=str(path), rollout__ignore_eos=True, workload__growth=-0.5))
    assert endless.completion(0, 0, 9) == LONGEST


def test_when_all_were_there_they_come_in_another_order(tmp_path: Path) -> None:
    path = lines(tmp_path / "many.jsonl", *({"group": g, "prompt_tokens": g + 1, "tokens": 5} for g in range(50)))
    asked = scenario(workload__trace=str(path))
    orders = [[lengths_of(asked).prompt(50 * again + each) for each in range(50)] for again in range(3)]
    assert orders[0] == list(range(1, 51)) and sorted(orders[1]) == orders[0] == sorted(orders[2])
    assert orders[1] != orders[0] != orders[2] != orders[1]
    again = lengths_of(scenario(workload__trace=str(path), run__seed=1))
    assert [again.prompt(each) for each in range(50, 100)] != orders[1]


def test_what_a_later_life_wrote_again_counts_once(tmp_path: Path) -> None:
    row = {"group": 0, "member": 0, "prompt_tokens": 1}
    path = lines(tmp_path / "lives.jsonl", row | {"life": 1, "tokens": 9}, row | {"life": 0, "tokens": 4})
    assert read_trace(path).groups == ((9,),)


def test_a_member_that_comes_twice_is_told(tmp_path: Path) -> None:
    row = {"group": 4, "member": 0, "prompt_tokens": 1, "tokens": 2}
    path = lines(tmp_path / "twice.jsonl", row, row | {"member": 1}, row | {"tokens": 3})
    with pytest.raises(ConfigError, match=r"twice\.jsonl:3: member 0 of group 4 comes twice"):
        read_trace(path)


def test_members_without_a_number_come_last(tmp_path: Path) -> None:
    told = [{"group": 0, "prompt_tokens": 1, "tokens": tokens} for tokens in range(1, 6)]
    path = lines(tmp_path / "some.jsonl", told[0], told[1] | {"member": 1}, told[2], told[3] | {"member": 0}, told[4])
    assert read_trace(path).groups == ((4, 2, 1, 3, 5),)
    lines(path, told[0], told[1])
    assert read_trace(path).groups == ((1, 2),), "a file that changed is read again"


def test_an_episode_is_no_trace(tmp_path: Path) -> None:
    with Source(write_run(tmp_path / "run"), Lives()) as source:
        for suffix in ("jsonl", "parquet"):
            export(source, tmp_path / f"talk.{suffix}", overwrite=False)
            with pytest.raises(ConfigError, match=r"talk\.(jsonl:|parquet, row )\d+: an episode"):
                read_trace(tmp_path / f"talk.{suffix}")


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ("{", "not JSON"),
        ("[" * 99_999, "not JSON"),
        ("[1]", "not an object"),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "not JSON"),
        ({}, "no field 'group' (the line has none)"),
        ({"group": 1, "tokens": 3}, "no field 'prompt_tokens' (group, tokens)"),
        ({"group": "a", "prompt_tokens": 1, "tokens": 3}, "field 'group' is 'a'"),
        ({"group": True, "prompt_tokens": 1, "tokens": 3}, "field 'group' is 'True'"),
        ({"group": 1, "prompt_tokens": 1, "tokens": 3.5}, "field 'tokens' is '3.5', not a whole number"),
        ({"group": 1, "prompt_tokens": 1, "tokens": None}, "field 'tokens' is 'None'"),
        ({"group": 1, "prompt_tokens": 1, "tokens": -3}, "tokens of -3 is less than 0"),
        ({"group": 1, "prompt_tokens": 0, "tokens": 3}, "prompt of 0 is less than 1"),
        ({"group": 1, "prompt_ids": 5, "tokens": 3}, "field 'prompt_ids' is '5', not a list"),
        ({"group": 1, "prompt_tokens": 1, "tokens": 3, "finish": 0}, "field 'finish' is '0'"),
        ({"group": 1, "prompt_tokens": 1, "tokens": 3, "turns": 1}, "field 'turns' is '1', not a list"),
        ('{"group": 1, "group": 2, "prompt_tokens": 1, "tokens": 3}', "the name 'group' comes twice"),
        ({"group": 0, "prompt_tokens": 2, "tokens": 3}, "group 0 has a prompt of 1 tokens, and of 2"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, record: object, told: str) -> None:
    path = lines(tmp_path / "a.jsonl", {"group": 0, "prompt_tokens": 1, "tokens": 1}, "", record)
    with pytest.raises(ConfigError) as raised:
        read_trace(path)
    assert raised.value.where == f"{path}:3" and told in raised.value.problem and len(raised.value.problem) < 400


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(ConfigError) as raised:
            read_trace(path)
        assert raised.value.where == "workload.trace"
        return raised.value.problem

    assert "No such file" in refused(tmp_path / "a.csv") and "No such file" in refused(tmp_path / "nowhere")
    (tmp_path / "a.csv").touch()
    assert "says no format" in refused(tmp_path / "a.csv") and "null" in refused(tmp_path / "a\0.jsonl")
    assert "No such file" in refused(tmp_path / "a.jsonl") and "No such file" in refused(tmp_path / "a.parquet")
    assert "no completion" in refused(lines(tmp_path / "a.jsonl"))
    assert "not Parquet" in refused(lines(tmp_path / "a.parquet", "hello, this is text"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "is a pipe or a device" in refused(tmp_path / "pipe.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    assert "cannot be read" in refused(tmp_path / "folder.jsonl")
    (tmp_path / "folder.parquet").mkdir()
    assert "cannot be read" in refused(tmp_path / "folder.parquet")
    pq.write_table(pa.table({"group": [1], "tokens": [2]}), tmp_path / "b.parquet")
    assert "no column prompt_ids or prompt_tokens" in refused(tmp_path / "b.parquet")
    pq.write_table(pa.table([[1], [2], [3], [4]], ["group", "tokens", "tokens", "prompt_tokens"]), tmp_path / "f.parquet")
    assert "two columns 'tokens'" in refused(tmp_path / "f.parquet")
    pq.write_table(pa.table({"group": [1], "tokens": [2.5], "prompt_tokens": [1]}), tmp_path / "c.parquet")
    assert "'tokens' is double" in refused(tmp_path / "c.parquet")
    content = (tmp_path / "b.parquet").read_bytes()
    (tmp_path / "e.parquet").write_bytes(content.replace(b"group", b"g\xffoup"))
    assert "e.parquet is not Parquet" in refused(tmp_path / "e.parquet")
    pq.write_table(pa.table({"group": [1, None], "tokens": [2, 2], "prompt_tokens": [1, 1]}), tmp_path / "d.parquet")
    assert "'group' is int64, 1 of its values empty" in refused(tmp_path / "d.parquet")


def test_without_pyarrow_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ConfigError, match="rollyard\\[parquet\\]"):
        read_trace(tmp_path / "a.parquet")
