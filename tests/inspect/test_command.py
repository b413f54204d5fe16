"""`rollyard inspect` as a user meets it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from rollyard import cli
from rollyard.inspect.source import Source
from rollyard.journal.folder import RunFolder
from rollyard.journal.journal import Journal
from rollyard.types import WeightVersion
from tests.inspect.runs import RUN, first_life, second_life, write_files, write_run
from tests.tiny import save_tokenizer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("inspect") / "run")


@pytest.fixture
def told(run: RunFolder, capsys: pytest.CaptureFixture[str]):
    def ask(*arguments: str, code: int = 0, folder: Path = run.path) -> str:
        assert cli.main(["inspect", str(folder), *arguments]) == code
        said = capsys.readouterr()
        return said.out if code == 0 else said.out + said.err

    return ask


def test_the_overview_says_how_the_run_stands(told, run):
    lines = told().splitlines()
    assert lines == [
        f"run      two lives   {run.path}",
        "failed   0, 1970-01-01 00:16:40 UTC to 1970-01-01 00:16:40 UTC: the disk is full",
        "life     1, 1970-01-01 00:33:20 UTC to no end: it was killed, or goes on elsewhere",
        "steps    3 of 3",
        "reward   0.500 ▁▁▁ 0.500 by step",
        "verdicts mean 0.557, from 0.000 to 1.000; 1 of 8 members have no verdict",
        "held out 0.250 (version 0), 4 samples",
        "time     12.00 s of steps: generate 74.6%, train 25.0%",
        "prompts  5 admitted, 3 trained, dropped: 1 stale, 1 under way",
        "members  8 finished, dropped: 2 stale, 1 no_verdict",
        "tokens   28 sampled, the longest completion 8",
        "versions 5 published",
        "saved    1 checkpoints, 1 still there; step 2 whole",
        "engines  1 up, 1 down",
        "         1970-01-01 00:16:40 UTC  engine-0 down: killed",
        "unsound  metrics.jsonl: 1 lines are not whole, and left out",
    ]


def test_one_life_is_told_by_itself(told):
    lines = told("--life", "0").splitlines()
    assert "steps    3 of 3" in lines and "prompts  4 admitted, 3 trained, dropped: 1 stale" in lines
    assert sum(line.startswith(("life", "failed")) for line in lines) == 1


def test_lists_for_people_and_for_programs(told):
    assert told("rollouts", "--sort", "worst", "--limit", "2") == (
        "life group m reward tokens finish wrote lag fate   completion\n"
        "   0     0 1  0.000      2   stop     0   0 step 1 ␛]0;owned␇[red]no[/] \ufffd2J\n"
        "   0     1 0  0.250      4 length   0-1   1 step 2 text 1.0\n"
        "2 of 10; --limit N shows more\n"
    )
    rows = [json.loads(line) for line in told("rollouts", "--json", "--limit", "0").splitlines()]
    assert len(rows) == 10 and rows[2]["versions"] == [0, 1]
    assert told("--json", "--limit", "2", "groups") == told("groups", "--json", "--limit", "2")
    assert [json.loads(line)["step"] for line in told("steps", "--json").splitlines()] == [1, 2, 3]
    assert "dropped" in told("steps").splitlines()[0] and "stale" in told("groups", "--dropped")
    assert json.loads(told("--json"))["finished"] == [8, 28, 8]


def test_one_rollout(told):
    assert told("rollout", "1", "0").splitlines()[0] == "group 1, member 0, life 0, row 11: trained in step 2"
    record = json.loads(told("rollout", "4", "0", "--json"))
    assert record["token_ids"] == [2, 4] and record["turns"][1]["prompt_ids"] == [6, 3, 2, 9, 9]
    assert record["spans"][0]["step"] == 2 and record["prompt"]["columns"] == {"answer": "a4"}


def test_sql_for_people_and_for_programs(told):
    sql = "SELECT group_id, best_reward FROM lineage WHERE trained_step = 1"
    assert told("--sql", sql) == "group_id best_reward\n1        0.75\n"
    sql = "SELECT token_ids, NULL AS none FROM completions ORDER BY rowid"
    assert json.loads(told("--sql", sql, "--limit", "1", "--json")) == {"token_ids": "0200000003000000", "none": None}
    assert "<8 bytes>" in told("--sql", sql) and "--limit" not in told("--sql", sql)
    assert told("--sql", sql, "--limit", "1").endswith("the first 1; --limit N shows more\n")


def test_ctrl_c_ends_a_question_that_takes_long(run, monkeypatch, request):
    def begun(*arguments):
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        return only_read(*arguments)

    only_read = Source.only_read
    monkeypatch.setattr(Source, "only_read", begun)
    before_us = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may have it ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before_us))
    long = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100000000) SELECT "
    for what in ("count(*) FROM c", "x FROM c WHERE x < 0"):  # its first row, and the next one
        before = time.process_time()
        assert cli.main(["inspect", str(run.path), "--sql", long + what]) == cli.STOPPED
        assert time.process_time() - before < 3  # all of it takes tens of seconds


def test_nothing_that_was_written_drives_the_terminal(told):
    """What a policy wrote is shown as it is, and no markup of ours either."""
    for arguments in (["rollouts"], ["rollout", "0", "1"], ["rollouts", "--json"], ["--sql", "SELECT text FROM completions"]):
        said = told(*arguments)
        assert "owned" in said and not any(sign in said for sign in "\x1b\x07\x9b") and "[red]no[/]" in said


def test_an_export_says_how_many(told, tmp_path):
    assert told("export", str(tmp_path / "out.jsonl")) == f"8 rollouts in {tmp_path / 'out.jsonl'}\n"
    assert json.loads(told("export", str(tmp_path / "out.jsonl"), "--overwrite", "--json"))["rollouts"] == 8


def test_an_export_that_fails_names_the_path_that_was_given(told):
    assert "'/proc/x.jsonl'" in told("export", "/proc/x.jsonl", code=1)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--limit", "x"], "'x' does not fit: give a whole number of at least 0"),
        (["rollout", "0", "9"], "it has 0, 1"),
        (["rollout", "17", "0"], "groups 0 to 4 were admitted"),
        (["rollout", "x", "0"], "GROUP: 'x' does not fit: give a whole number"),
        (["rollouts", "--sort", "nicest"], "invalid choice"),
        (["rollouts", "--limit", "-1"], "--limit"),
        (["steps", "--sort", "worst"], "no option '--sort'"),
        (["dance"], "invalid choice"),
        (["--check", "--sql", "SELECT 1"], "do not go together"),
        (["--check", "steps"], "do not go together"),
        (["--life", "1", "--all"], "do not go together"),
        (["--life", "7"], "it has 0, 1"),
        (["--sql", ""], "no SELECT"),
        (["export", "out.csv"], "no format"),
    ],
)
def test_mistakes_end_with_2(told, arguments, problem):
    assert problem in told(*arguments, code=2).replace("\n       ", " ")


# ------------------------------------------------------------------------------------------------- what is broken


def test_a_run_is_sound_or_not(told, run, tmp_path):
    whole = tmp_path / "whole"
    shutil.copytree(run.path, whole)
    (whole / "metrics.jsonl").write_text("".join((run.path / "metrics.jsonl").read_text().splitlines(keepends=True)[:-1]))
    lines = told("--check", folder=whole).splitlines()
    assert all(line.startswith("sound ") for line in lines) and any("completions" in line for line in lines)
    assert any("1 lines are not whole" in line for line in told("--check", code=1).splitlines())


def test_a_damaged_journal_is_read_as_far_as_it_goes(told, run, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(run.path, broken)
    journal, page = broken / "journal.sqlite", 4096
    content = bytearray(journal.read_bytes())
    at = content.index(b"said twice") // page * page  # the page of the completions' texts
    content[at : at + page] = b"\xff" * page
    journal.write_bytes(content)
    said = told(folder=broken)
    assert "unsound  finished: " in said and "malformed" in said and "held out 0.250" in said and "prompts  5 admitted" in said
    said = " ".join(told("--check", code=1, folder=broken).split())
    assert "broken unreadable" in said and "broken table completions" in said and "sound table engine_events" in said
    assert "malformed" in told("rollouts", code=1, folder=broken)
    assert told("steps", code=1, folder=broken)


def test_a_journal_that_is_none(told, tmp_path):
    write_files(tmp_path)
    (tmp_path / "journal.sqlite").write_bytes(b"x" * 5000)
    assert "\nunsound journal.sqlite: " in told(folder=tmp_path)
    assert "not a database" in told("--check", code=1, folder=tmp_path)
    assert "not a database" in told("rollouts", code=1, folder=tmp_path)


def test_a_run_that_was_killed_before_its_first_life_began(told, tmp_path):
    write_files(tmp_path)
    first_life(tmp_path / "journal.sqlite").close()
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as emptied:
        for (table,) in emptied.execute("SELECT name FROM sqlite_schema WHERE type = 'table'").fetchall():
            emptied.execute(f"DELETE FROM {table}")
        emptied.commit()
    said = " ".join(told(folder=tmp_path).split())
    assert "prompts 0 admitted, 0 trained" in said and "unsound journal" not in said
    assert told("rollouts", "--json", folder=tmp_path) == told("steps", "--json", folder=tmp_path) == ""
    assert "no prompt was admitted" in told("rollout", "0", "0", code=2, folder=tmp_path)
    assert "no run has begun in it" in told("--check", code=1, folder=tmp_path)
    assert told("export", str(tmp_path.parent / f"{tmp_path.name}.jsonl"), folder=tmp_path).startswith("0 rollouts")


def test_a_run_that_is_being_written(told, tmp_path):
    write_files(tmp_path)
    first_life(tmp_path / "journal.sqlite").close()
    journal = second_life(tmp_path / "journal.sqlite")
    assert "to no end: it was killed, or goes on elsewhere" in told(folder=tmp_path)
    assert len(told("rollouts", "--json", folder=tmp_path).splitlines()) == 10
    journal.close()


def test_of_an_exchange_the_job_s_own_folder_is_meant_and_checkpoints_are_what_is_shared(told, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared" / "agreed").mkdir(parents=True)
    assert "generation job's own folder" in told(code=2, folder=tmp_path / "shared")
    own = tmp_path / "own"
    shutil.copytree(run.path, own)
    (own / "config.toml").write_text('[exchange]\nfolder = "shared"\n')
    journal = Journal(own / "journal.sqlite", RUN)
    for step in (3, 4):
        journal.commit_checkpoint(WeightVersion(step, 2), f"shared/weights/{step:06d}", 5, {}).result(60)
    journal.close()
    save_tokenizer(tmp_path / "shared" / "weights" / "000004")
    assert "saved    3 checkpoints, 2 still there; step 2 whole; step 4 " in told(folder=own)
    assert told("rollout", "1", "0", folder=own).endswith("abcd\n")
