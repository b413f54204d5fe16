"""Bytes that are no text: resume, check, inspect and export go on without that row, or name it."""

import sqlite3
import warnings
from contextlib import closing
from pathlib import Path

import pytest

from rollyard import cli
from rollyard.journal.check import Kind, check_journal
from rollyard.journal.recover import read_past
from tests.inspect.runs import write_run

SUMMED = ["prompts.text", "completions.text", "completions.spans", "verdicts.problem", "partials.spans"]
OTHERS = ["drops.cause", "checkpoints.counters", "engine_events.text", "incarnations.config", "incarnations.cause"]


@pytest.mark.parametrize("spoilt", [[each] for each in SUMMED] + [OTHERS], ids=lambda spoilt: spoilt[0])
def test_a_byte_that_is_no_text_spoils_its_own_row_alone(
    tmp_path: Path, spoilt: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    with closing(sqlite3.connect(folder.journal)) as connection, connection:
        for table, _, column in (each.partition(".") for each in spoilt):
            connection.execute(f"UPDATE {table} SET {column} = CAST({column} || x'ff' AS TEXT)")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        past = read_past(folder.journal, lambda name: True)
    assert past.lives == 2 and past.version.step == (0 if spoilt == OTHERS else 2)
    assert told and all("damaged" in str(each.message) for each in told)
    found = check_journal(folder.journal, lambda name: None)
    assert any(each.kind is Kind.DAMAGED for each in found.findings) and all(each.rows is not None for each in found.tables)
    assert not any(each.kind is Kind.UNREADABLE for each in found.findings)
    code = cli.main(["inspect", str(folder.path), "rollouts"])
    assert code == ("a value is not what it should be" in capsys.readouterr().err) == (spoilt == ["completions.spans"])
    code = cli.main(["inspect", str(folder.path), "export", str(tmp_path / "x.jsonl")])
    assert code == (spoilt != OTHERS and spoilt != ["partials.spans"])
    assert ("is damaged" in capsys.readouterr().err) == bool(code)
