"""What is wrong with a journal is found, each thing by its kind; random histories are sound."""

import re
import sqlite3
from pathlib import Path

import pytest

from rollyard.events import Admit, Drop, Finish, Keep, Score, Scored, Train
from rollyard.journal.check import Checked, Finding, Kind, check_journal
from rollyard.types import DropReason, Reward
from tests.journal.test_recover import V1, Life, complete, group_of, prompt, rollout, wrote


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The journal of a run of which everything is sound, and its checkpoint."""
    path = tmp_path / "journal.sqlite"
    life = Life(path)
    for id_ in range(3):
        life.step(*complete(group_of(id_)))
    life.train(0, 0)
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    life.checkpoint(V1)
    life.train(1, 1)
    life.step(Admit(prompt(3)), wrote(3, 0, (1, 2)))
    life.journal.flush()
    life.step(wrote(3, 0, (3,)))
    life.kill()
    return path


def look(path: Path, *broken: str) -> Checked:
    return check_journal(path, lambda folder: folder not in broken if (path.parent / folder).exists() else None)


def change(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


def test_a_journal_that_is_sound(path: Path) -> None:
    found = look(path)
    assert found.findings == () and found.checkpoint == "checkpoints/1"
    assert {table.table: table.rows for table in found.tables} == {
        "incarnations": 1,
        "prompts": 4,
        "partials": 2,
        "completions": 6,
        "verdicts": 6,
        "drops": 0,
        "batches": 2,
        "batch_groups": 2,
        "versions": 0,
        "evaluations": 0,
        "checkpoints": 1,
        "engine_events": 0,
    }


WRONG: list[tuple[str, Kind, str]] = [
    (
        "UPDATE completions SET text = 'x' WHERE group_id = 1 AND member = 0",
        Kind.DAMAGED,
        "1 rows of completions are not",
    ),
    (
        "UPDATE completions SET spans = 'x' WHERE group_id = 2",
        Kind.DAMAGED,
        "2 rows of completions .* prompt 2, member 0",
    ),
    ("UPDATE verdicts SET value = 0.5 WHERE group_id = 1 AND member = 0", Kind.DAMAGED, "1 rows of verdicts"),
    ("UPDATE prompts SET columns = '{}' WHERE group_id = 2", Kind.DAMAGED, "1 rows of prompts .* prompt 2 of life 0"),
    ("UPDATE partials SET logprobs = zeroblob(8) WHERE position = 0", Kind.DAMAGED, "1 rows of partials"),
    ("DELETE FROM prompts WHERE group_id = 2", Kind.REFERENCE, "row . of completions to prompts"),
    (
        "INSERT INTO drops VALUES (0, 0, NULL, 'stale', '', 0), (0, 0, 0, 'stale', '', 0), (0, 0, 1, 'stale', '', 0)",
        Kind.PROMPT,
        "1 prompts were taken for training, and dropped: prompt 0 of life 0",
    ),
    ("UPDATE incarnations SET ended_at = 1", Kind.PROMPT, "2 prompts were neither trained nor dropped when"),
    ("UPDATE completions SET member = 2 WHERE member = 1 AND group_id = 2", Kind.MEMBER, "1 members are none of their group"),
    (
        "INSERT INTO drops VALUES (0, 3, NULL, 'failed', '', 0)",
        Kind.MEMBER,
        "1 prompts were dropped, and not all of",
    ),
    ("UPDATE verdicts SET value = NULL WHERE group_id = 2 AND member = 0", Kind.MEMBER, "1 members have no verdict"),
    ("UPDATE partials SET group_id = 2", Kind.MEMBER, "1 members have finished, and are being written"),
    ("UPDATE completions SET tokens = 9 WHERE group_id = 2", Kind.TOKENS, "2 completions contradict themselves"),
    ("UPDATE completions SET spans = '[[0,0,0,0,1]]' WHERE group_id = 2", Kind.TOKENS, "2 completions contradict themselves"),
    ("DELETE FROM partials WHERE position = 0", Kind.TOKENS, "1 rows of unfinished members"),
    (
        "DELETE FROM verdicts WHERE group_id = 0 AND member = 1",
        Kind.BATCH,
        "1 groups of batches are not complete: prompt 0",
    ),
    ("INSERT INTO batches VALUES (0, 2, 0, NULL)", Kind.BATCH, "1 batches have no groups: step 2 of life 0"),
    ("UPDATE incarnations SET begun_step = 5", Kind.BATCH, "1 batches do not follow the one before: step 0 of life 0"),
    ("UPDATE checkpoints SET version_step = 7", Kind.LEDGER, "1 checkpoints have weights"),
    ("UPDATE checkpoints SET folder = 'checkpoints/3'", Kind.CHECKPOINT, "checkpoints/3 .it is the newest, and is not there."),
]


@pytest.mark.parametrize(("statement", "kind", "text"), WRONG)
def test_what_is_wrong_is_found(path: Path, statement: str, kind: Kind, text: str) -> None:
    change(path, statement)
    found = [finding for finding in look(path).findings if finding.kind is kind]
    assert len(found) == 1 and re.search(text, found[0].text), look(path).findings


def test_a_checkpoint_that_is_not_whole_is_told_and_passed_over(path: Path) -> None:
    found = look(path, "checkpoints/1")
    assert found.findings == (Finding(Kind.CHECKPOINT, "1 checkpoints are not whole: checkpoints/1"),)
    assert found.checkpoint == ""


def test_a_prompt_that_two_lives_trained_is_no_finding_unless_both_survive(path: Path) -> None:
    life = Life(path, V1)
    life.step(Admit(prompt(1)), Keep(group_of(1), recovered=True))
    life.train(1, 1, life=1)
    life.kill()
    assert look(path).findings == ()
    change(path, *(f"UPDATE {table} SET step = 2 WHERE incarnation = 1" for table in ("batches", "batch_groups")))
    change(path, "UPDATE incarnations SET begun_step = 2 WHERE incarnation = 1")
    assert Finding(Kind.PROMPT, "1 prompts are in two batches of what survives: prompt 1") in look(path).findings


def test_a_run_that_was_stopped_is_sound(path: Path) -> None:
    life = Life(path, V1)
    life.step(Admit(prompt(1)), Keep(group_of(1), recovered=True))
    life.step(Train(1, (group_of(1),)))
    life.step(Admit(prompt(3)), Score(prompt(3), rollout(3, 0).completion), Scored(3, 0, Reward(None)))
    life.step(Drop(3, 0, DropReason.NO_VERDICT))
    ends = [Drop(1, 0, DropReason.STOPPED), Drop(1, 1, DropReason.STOPPED), Drop(1, None, DropReason.STOPPED)]
    life.step(*ends, Drop(3, 1, DropReason.STOPPED), Drop(3, None, DropReason.STOPPED), Finish("asked", stopped=True))
    life.journal.close()
    assert look(path).findings == ()


def pages(path: Path) -> bytes:
    """Fold the log into the file, and return that."""
    change(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    return path.read_bytes()


def test_a_truncated_file_is_unreadable_and_what_can_be_read_is_told(path: Path) -> None:
    whole = pages(path)
    path.write_bytes(whole[: len(whole) // 2])
    found = look(path)
    assert found.findings and found.findings[0].kind in (Kind.UNREADABLE, Kind.BROKEN)


def test_flipped_bytes_are_found_wherever_they_are(path: Path) -> None:
    whole = pages(path)
    place = whole.index(b"2.1\x00") if b"2.1\x00" in whole else whole.index(b'{"match": 1.0}')
    path.write_bytes(whole[:place] + b"9" + whole[place + 1 :])
    assert Kind.DAMAGED in {finding.kind for finding in look(path).findings}


def test_what_is_no_journal_is_one_finding(tmp_path: Path) -> None:
    for content in (b"", b"x" * 5000):
        (tmp_path / "journal.sqlite").write_bytes(content)
        (finding,) = look(tmp_path / "journal.sqlite").findings
        assert finding.kind is Kind.UNREADABLE and "journal.sqlite" in finding.text
    (finding,) = look(tmp_path / "none.sqlite").findings
    assert finding == Finding(Kind.UNREADABLE, f"{tmp_path / 'none.sqlite'}: no such file")
