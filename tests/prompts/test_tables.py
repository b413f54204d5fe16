"""Prompts from Parquet files and from data sets of Hugging Face `datasets`."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollyard.config import Config, PromptsConfig
from rollyard.errors import ConfigError
from rollyard.layers import resolve
from rollyard.prompts.open import check_prompts
from rollyard.prompts.source import Row
from rollyard.prompts.tables import read_data

ROWS = [
    {"question": "2+3=", "solution": "5", "level": 1, "tags": ["sum"]},
    {"question": "4*5=", "solution": "20", "level": 2, "tags": []},
]
CHATS = [{"question": [{"role": "user", "content": "hi"}], "solution": "ho", "level": None, "tags": ["a", "b"]}]


def prompts(**options: object) -> PromptsConfig:
    return PromptsConfig.model_validate({"field": "question"} | options)


def refused(**options: object) -> ConfigError:
    with pytest.raises(ConfigError) as raised:
        read_data(prompts(**options))
    return raised.value


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


def test_a_parquet_file_is_read_as_the_same_lines_of_json(tmp_path: Path, parquet: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    chosen = ["answer=solution", "level"]
    for options in ({}, {"columns": chosen}):
        assert read_data(prompts(path=str(parquet), **options)) == read_data(prompts(path=str(lines), **options))
    first, _ = read_data(prompts(path=str(parquet), columns=chosen))
    assert first == Row("2+3=", {"answer": "5", "level": 1})
    config = Config.model_validate({"prompts": {"path": str(parquet), "field": "question", "columns": chosen}})
    assert check_prompts(config) == {"answer", "level"}


def test_conversations_in_parquet(tmp_path: Path) -> None:
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist(CHATS), path)
    (row,) = read_data(prompts(path=str(path)))
    assert row == Row(({"role": "user", "content": "hi"},), {"solution": "ho", "level": None, "tags": ["a", "b"]})


def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, parquet: Path) -> None:
    assert refused(path=str(parquet), field="text").where == f"{parquet}, row 0"
    assert "(question, solution, level, tags)" in refused(path=str(parquet), field="text").remedy
    assert "no field 'answer'" in refused(path=str(parquet), columns=["answer"]).problem
    assert "subset" in refused(path=str(parquet), subset="main").problem
    broken = tmp_path / "broken.parquet"
    broken.write_text("no parquet")
    assert "cannot be read" in refused(path=str(broken)).problem
    for name in ("pipe.parquet", "pipe.jsonl"):
        os.mkfifo(tmp_path / name)
        assert "is a pipe or a device" in refused(path=str(tmp_path / name)).problem
    empty = tmp_path / "empty.parquet"
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), empty)
    assert "has no rows" in refused(path=str(empty)).problem
    dated = tmp_path / "dated.parquet"
    pq.write_table(pa.table({"question": ["a"], "when": [datetime.date(2026, 1, 1)]}), dated)
    assert "'when' holds what JSON has no words for" in refused(path=str(dated)).problem
    assert read_data(prompts(path=str(dated), columns=["question"])) == [Row("a", {"question": "a"})]
    missing = tmp_path / "missing.parquet"
    pq.write_table(pa.table({"question": ["a", "b"], "level": [1.0, float("nan")]}), missing)
    assert refused(path=str(missing)).where == f"{missing}, row 1" and "nan" in refused(path=str(missing)).problem
    nothing = tmp_path / "nothing.parquet"
    pq.write_table(pa.table({"question": ["a", None]}), nothing)
    assert refused(path=str(nothing)).where == f"{nothing}, row 1"


def test_options_that_do_not_go_together() -> None:
    def problem(**options: object) -> str:
        with pytest.raises(ConfigError) as raised:
            resolve(environment={}, overrides={"model.path": "m"} | {f"prompts.{name}": value for name, value in options.items()})
        return f"{raised.value.where}: {raised.value.problem}"

    assert "prompts.dataset and prompts.task are given" in problem(task="sort", dataset="a/b")
    assert problem(task="sort", split="train").startswith("prompts.split: split is of a file or a data set")
    assert problem(path="a.jsonl", columns="answer,answer=b").startswith(
        "prompts.columns: 'answer,answer=b' names a column twice"
    )


@pytest.mark.slow  # the package takes seconds to import
def test_data_sets_of_hugging_face(tmp_path: Path, parquet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved ones, with and without splits; a folder of files; and nothing is asked of the hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    expected = read_data(prompts(path=str(parquet)))
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    assert read_data(prompts(path=str(tmp_path / "one"))) == expected
    datasets.DatasetDict({"train": one, "test": datasets.Dataset.from_list(CHATS[:0] + ROWS[:1])}).save_to_disk(
        str(tmp_path / "two")
    )
    assert read_data(prompts(path=str(tmp_path / "two"), split="train")) == expected
    assert read_data(prompts(path=str(tmp_path / "two"), split="test")) == expected[:1]
    assert refused(path=str(tmp_path / "two")).remedy == "one of: train, test"
    assert refused(path=str(tmp_path / "two"), split="tran").remedy == "did you mean train?"
    assert refused(path=str(tmp_path / "one"), split="train").problem.endswith("has no splits")
    files = tmp_path / "files"
    files.mkdir()
    (files / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read_data(prompts(path=str(files))) == expected
    assert read_data(prompts(path=str(files), columns=["answer=solution"]))[1] == Row("4*5=", {"answer": "20"})
    (tmp_path / "hollow").mkdir()
    assert "cannot be read as a data set" in refused(path=str(tmp_path / "hollow")).problem
    away = refused(dataset="openai/gsm8k", subset="main", split="train")
    assert away.where == "prompts.dataset" and "HF_HUB_OFFLINE=0" in away.remedy


def test_without_verifiers_its_tasks_are_refused() -> None:
    """It has an environment of its own: see tests/episode/test_verifiers.py."""
    options = {"prompts.task": "verifiers/letters", "environment.name": "verifiers", "model.path": "m"}
    config = resolve(environment={}, overrides=options).config
    with pytest.raises(ConfigError) as raised:
        check_prompts(config)
    assert (raised.value.where, raised.value.remedy) == ("prompts.task", "pip install 'rollyard[verifiers]'")
    with pytest.raises(ConfigError, match=r"environment\.name: tasks of verifiers are played by its environment"):
        resolve(environment={}, overrides=options | {"environment.name": ""})
