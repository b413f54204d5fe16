"""docs/journal.md does what it says."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest

from rollyard import cli
from rollyard.inspect.source import Source
from rollyard.journal.folder import RunFolder
from rollyard.journal.schema import TABLES
from tests.inspect.runs import write_run

PAGE = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()
SQL = re.findall(r"^```sql\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(PYTHON,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("inspect") / "run")


@pytest.mark.parametrize("sql", SQL)
def test_each_query_finds_something(run: RunFolder, sql: str) -> None:
    with Source(run) as source:
        names, rows = source.only_read(sql)
        assert list(rows) and len(set(names)) == len(names)


def test_what_some_of_them_find(run: RunFolder) -> None:
    with Source(run) as source:
        found = [list(source.rows(sql)) for sql in SQL]
    assert found[1] == [(0, 2, 0.5, 2.0), (1, 2, 0.5, 5.0), (2, 2, 0.5, 5.0)]
    assert found[3] == [(0, "stale", 1, "too old")]
    assert found[6] == [(0, 0, "the disk is full", 1), (1, 2, None, 0)]
    assert found[-1] == [(1, 4, 1, 3)]


def test_every_table_is_in_one_of_them() -> None:
    made = {found[1] for sql in TABLES if (found := re.match(r"\s*CREATE TABLE (\w+)", sql))}
    assert made and made <= set(re.findall(r"\w+", " ".join(SQL)))


def test_blobs_are_read_as_it_says(run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(run.path)
    exec(compile(PYTHON, "docs/journal.md", "exec"), {})
    assert capsys.readouterr().out.splitlines()[0] == "[2 3] [-0.25 -0.25]"


def test_each_command_is_understood() -> None:
    commands = [line.partition("#")[0] for line in PAGE.splitlines() if line.startswith("rollyard inspect runs/")]
    assert len(commands) == 12
    for command in commands:
        given = cli._parser().parse_args(shlex.split(command)[1:])
        assert isinstance(given, argparse.Namespace) and given.command == "inspect"
