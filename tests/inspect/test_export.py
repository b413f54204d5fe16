"""What is exported is what was recorded, and a file is there whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rollyard.errors import ConfigError, JournalError
from rollyard.inspect import parquet
from rollyard.inspect.export import export
from rollyard.inspect.source import Lives, Source
from rollyard.journal.folder import RunFolder
from tests.inspect.runs import EVIL, write_run

SURVIVED = Lives()
TWO = {
    "life": 0,
    "group": 1,
    "member": 0,
    "row": 11,
    "prompt": "prompt 1",
    "prompt_ids": [3, 3],
    "columns": {"answer": "a1"},
    "completion": "text 1.0",
    "token_ids": [2, 3, 4, 5],
    "logprobs": [-0.25] * 4,
    "spans": [
        {"step": 0, "life": 0, "oldest_kv_step": 0, "oldest_kv_life": 0, "tokens": 2},
        {"step": 1, "life": 0, "oldest_kv_step": 0, "oldest_kv_life": 0, "tokens": 2},
    ],
    "turns": [],
    "finish": "length",
    "reward": 0.25,
    "rewards": {"match": 0.25, "form": 0.5},
    "problem": "",
    "step": 2,
    "trained": True,
    "dropped": None,
    "drop_cause": None,
    "finished_at": 1000.0625,
}
TALK = [{"prompt_ids": [6, 3], "tokens": 1, "finish": "stop"}, {"prompt_ids": [6, 3, 2, 9, 9], "tokens": 1, "finish": "context"}]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("inspect") / "run")


def exported(run: RunFolder, path: Path, lives: Lives = SURVIVED, *, overwrite: bool = False) -> int:
    with Source(run, lives) as source:
        return export(source, path, overwrite=overwrite)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_json_lines_have_all_of_a_rollout(run: RunFolder, tmp_path: Path) -> None:
    assert exported(run, tmp_path / "out.jsonl") == 8
    records = lines(tmp_path / "out.jsonl")
    assert records[2] == TWO and records[1]["completion"] == EVIL
    assert [(each["life"], each["group"], each["member"]) for each in records[4:]] == [(0, 3, 0), (1, 2, 0), (1, 2, 1), (1, 4, 0)]
    assert (records[4]["dropped"], records[4]["drop_cause"], records[4]["trained"]) == ("stale", "too old", False)
    talk = records[-1]
    assert (talk["reward"], talk["problem"], talk["step"], talk["turns"]) == (None, "no number", None, TALK)


def test_parquet_has_the_same(run: RunFolder, tmp_path: Path) -> None:
    assert exported(run, tmp_path / "out.parquet") == exported(run, tmp_path / "out.jsonl") == 8
    table = pq.read_table(tmp_path / "out.parquet")
    found = table.to_pylist(maps_as_pydicts="strict")
    for record in found:
        record |= {"columns": json.loads(record["columns"]), "finished_at": record["finished_at"].timestamp()}
    assert found == lines(tmp_path / "out.jsonl")
    assert str(table.schema.field("logprobs").type) == "list<element: float>"


def test_lives_are_chosen_as_in_lists(run: RunFolder, tmp_path: Path) -> None:
    assert exported(run, tmp_path / "first.jsonl", Lives(0)) == 7
    assert exported(run, tmp_path / "each.jsonl", Lives(each=True)) == 10


def test_parquet_is_written_part_by_part(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By number of rollouts, and by how long they are."""
    monkeypatch.setattr(parquet, "ROWS", 3)
    exported(run, tmp_path / "rows.parquet")
    monkeypatch.setattr(parquet, "PART", 1)
    exported(run, tmp_path / "bytes.parquet")
    whole = pq.read_table(tmp_path / "rows.parquet")
    assert pq.read_table(tmp_path / "bytes.parquet") == whole and whole.num_rows == 8
    assert [pq.ParquetFile(tmp_path / name).num_row_groups for name in ("rows.parquet", "bytes.parquet")] == [3, 8]


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet"])
def test_a_journal_that_is_damaged_further_on_leaves_no_file(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path / "run")
    content = run.journal.read_bytes()
    assert content.count(b"said twice") == 1
    run.journal.write_bytes(content.replace(b"[[2, 0, 2, 0, 2]]", b"[[2, 0, 2, 0, x]]"))
    with pytest.raises(JournalError, match="prompt 4, member 0 of life 1 is damaged"):
        exported(run, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_file_that_is_there_is_replaced_only_if_that_was_said(run: RunFolder, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        exported(run, path)
    assert path.read_text() == "mine"
    assert exported(run, path, overwrite=True) == 8 and len(lines(path)) == 8


def test_nothing_in_the_run_s_folder_is_replaced(run: RunFolder) -> None:
    before = run.metrics.read_bytes()
    for path in (run.metrics, run.path / "checkpoints" / "out.jsonl"):
        with pytest.raises(ConfigError, match="the run's own folder"):
            exported(run, path, overwrite=True)
    assert run.metrics.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "told"),
    [("out.csv", "no format"), ("out", "no format"), ("nowhere/out.jsonl", "no folder"), ("folder.jsonl", "exists already")],
)
def test_names_that_do_not_fit_are_mistakes(run: RunFolder, tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(ConfigError, match=told):
        exported(run, tmp_path / name, overwrite=True)


def test_without_pyarrow_that_is_said(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    monkeypatch.delitem(__import__("sys").modules, "rollyard.inspect.parquet")
    with pytest.raises(ConfigError, match="rollyard\\[parquet\\]"):
        exported(run, tmp_path / "out.parquet")
