import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rollyard.errors import JournalError
from rollyard.events import Admit, Event, FetchPrompts, Instruction, Keep, Score, Scored, Train
from rollyard.journal.journal import HELD_MOST, Journal
from rollyard.lives import Wrote
from rollyard.types import Group, Prompt, RequestId, Reward, Segment, WeightVersion
from tests.journal.records import CAB, ENTRIES, GOOD, POOR, RUN, V1


def rows(path: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def written(path: Path) -> Path:
    times = iter(range(1000, 2000))
    journal = Journal(path, RUN, clock=lambda: float(next(times)))
    for entry in ENTRIES:
        journal.record_step([entry])
    journal.record_evaluation(V1, 0.75, samples=4)
    journal.close()
    return path


def test_the_file_is_wal_and_says_its_format(written: Path) -> None:
    assert rows(written, "PRAGMA journal_mode") == [("wal",)]
    assert rows(written, "PRAGMA user_version") == [(3,)]
    assert rows(written, "PRAGMA foreign_key_check") == []
    assert rows(written, "PRAGMA integrity_check") == [("ok",)]


def test_what_an_earlier_life_wrote_is_recorded_in_this_one_too(path: Path) -> None:
    journal, group = Journal(path, RUN), Group(CAB, (GOOD, POOR))
    journal.record_step((Admit(CAB), Keep(group, recovered=True)))
    journal.close()
    assert rows(path, "SELECT group_id, member, text FROM completions") == [(0, 0, "abc"), (0, 1, "acb")]
    assert rows(path, "SELECT member, value FROM verdicts") == [(0, 1.0), (1, 0.0)]


def test_every_table_holds_what_happened(written: Path) -> None:
    run = "SELECT incarnation, name, rollyard, seed, group_size, config, started_at, cause, failed FROM incarnations"
    assert rows(written, run) == [(0, "sort", "0.1.0", 7, 2, RUN.config, 1000.0, "no engine is left: killed", 1)]
    assert rows(written, "SELECT group_id, row, text, json_extract(columns, '$.answer') FROM prompts") == [
        (0, 5, "cab", "abc"),
        (1, 2, "zy", "yz"),
    ]
    assert rows(written, "SELECT group_id, member, tokens, oldest_version, finish, text FROM completions") == [
        (0, 0, 3, 0, "stop", "abc"),
        (1, 0, 3, 0, "context", "?"),
        (0, 1, 3, 0, "stop", "acb"),
    ]
    assert rows(written, "SELECT group_id, member, value, problem FROM verdicts ORDER BY judged_at") == [
        (0, 0, 1.0, ""),
        (1, 0, None, "ValueError: no number"),
        (0, 1, 0.0, ""),
    ]
    assert rows(written, "SELECT group_id, member, reason FROM drops") == [
        (1, 0, "no_verdict"),
        (1, 1, "failed"),
        (1, None, "failed"),
    ]
    # clock readings: 1000 opens, one a step from 1001 on; Train is the 16th, BatchTrained the 17th
    assert rows(written, "SELECT step, taken_at, trained_at FROM batches") == [(0, 1016.0, 1017.0)]
    assert rows(written, "SELECT step, position, group_id FROM batch_groups") == [(0, 0, 0)]
    assert rows(written, "SELECT version_step, version_incarnation FROM versions") == [(0, 0), (1, 0)]
    assert rows(written, "SELECT version_step, mean_reward, samples, unscored FROM evaluations") == [(1, 0.75, 4, 0)]
    assert rows(written, "SELECT event, version_step, text FROM engine_events") == [
        ("up", None, "4 slots"),
        ("loaded", 0, ""),
        ("request failed", None, "group 1, member 1, attempt 0: out of pages"),
        ("down", None, "killed"),
    ]


def test_views_join_it_for_people(written: Path) -> None:
    sql = "SELECT group_id, member, prompt, completion, reward, trained_step, dropped FROM rollouts ORDER BY 1, 2"
    assert rows(written, sql) == [
        (0, 0, "cab", "abc", 1.0, 0, None),
        (0, 1, "cab", "acb", 0.0, 0, None),
        (1, 0, "zy", "?", None, None, "no_verdict"),
    ]
    sql = "SELECT group_id, members, judged, mean_reward, worst_reward, best_reward, tokens, trained_step, dropped FROM groups"
    assert rows(written, sql) == [(0, 2, 2, 0.5, 0.0, 1.0, 6, 0, None), (1, 1, 0, None, None, None, 3, None, "failed")]


def test_a_batch_taken_but_not_trained_yet_has_trained_nothing(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.record_step((Admit(CAB), Score(CAB, GOOD.completion), Scored(0, 0, GOOD.reward), Train(0, (Group(CAB, (GOOD,)),))))
    journal.flush()
    assert rows(path, "SELECT step FROM batches") == [(0,)]
    assert rows(path, "SELECT trained_step FROM rollouts") == [(None,)]
    journal.close()


def test_rows_are_written_by_a_flush_and_not_before(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.record_step([Admit(CAB)])
    journal.record_step([FetchPrompts(1)])
    assert rows(path, "SELECT count(*) FROM prompts") == [(0,)]
    journal.flush()
    assert rows(path, "SELECT count(*) FROM prompts") == [(1,)]
    journal.close()


def test_a_row_waits_no_longer_than_a_second_while_somebody_ticks(path: Path) -> None:
    now = 50.0
    journal = Journal(path, RUN, timer=lambda: now)
    journal.record_step([Admit(CAB)])
    now = 50.9
    journal.record_step([Score(CAB, GOOD.completion)])
    journal.tick()
    assert journal._writing is None
    now = 51.0
    journal.record_step([Scored(0, 0, GOOD.reward)])
    journal.tick()
    assert journal._writing is not None
    journal._writing.result(10)
    assert rows(path, "SELECT count(*) FROM verdicts") == [(1,)]
    journal.close()


def test_what_waits_is_bounded_however_little_time_has_passed(path: Path) -> None:
    """Rollouts can come faster than they are written: then their source waits, and memory does not grow."""
    journal = Journal(path, RUN, timer=lambda: 50.0)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    waited = False
    for group in range(2 * HELD_MOST):  # each with the moment of its step: twice as many entries
        journal.record_step([Admit(Prompt(group, group, (1,), ""))])
        journal.tick()
        assert len(journal._entries) <= HELD_MOST
        if journal._writing is not None and not waited:
            waited = True
            assert group == HELD_MOST // 2 and not journal._writing.done()
            threading.Timer(0.2, lambda: other.execute("ROLLBACK")).start()
    journal.close()
    assert rows(path, "SELECT count(*) FROM prompts") == [(2 * HELD_MOST,)]
    other.close()


def test_tokens_of_members_that_have_not_finished_wait_three_seconds(path: Path) -> None:
    now = 0.0
    journal = Journal(path, RUN, timer=lambda: now)

    def tick(at: float, *entries: Event | Instruction) -> list[tuple[object, ...]]:
        nonlocal now
        now = at
        journal.record_step(entries)
        journal.tick()
        if journal._writing is not None:
            journal._writing.result(10)
        return rows(path, "SELECT group_id, member, position, tokens FROM partials ORDER BY 1, 2, 3")

    def wrote(member: int) -> Wrote:
        return Wrote(Segment(RequestId(0, member), (7, 8), (-0.5, -0.5), V1, V1))

    assert tick(1.0, Admit(CAB), wrote(0), wrote(1)) == []
    assert tick(2.0, wrote(1)) == []
    assert tick(3.0, wrote(0)) == [(0, 0, 0, 4), (0, 1, 0, 4)]
    assert tick(4.0, wrote(0), Score(CAB, POOR.completion)) == [(0, 0, 0, 4)]  # what has finished does not wait
    assert tick(6.0) == [(0, 0, 0, 4), (0, 0, 4, 2)]
    journal.record_step([wrote(0)])
    journal.commit_checkpoint(V1, "checkpoints/1", 1, {}).result(60)
    assert rows(path, "SELECT sum(tokens) FROM partials") == [(8,)]
    journal.close()


def test_what_a_thread_could_not_write_is_told_once_and_written_later(path: Path) -> None:
    now = 0.0
    journal = Journal(path, RUN, timer=lambda: now, busy_s=0.01)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    now = 1.0
    journal.record_step([Admit(CAB)])
    journal.tick()
    assert journal._writing is not None and isinstance(journal._writing.exception(10), JournalError)
    now = 1.5
    journal.record_step([Score(CAB, GOOD.completion)])
    journal.tick()  # nothing is due
    now = 2.0
    journal.record_step([Scored(0, 0, GOOD.reward)])
    with pytest.raises(JournalError, match="locked"):
        journal.tick()
    other.execute("ROLLBACK")
    other.close()
    journal.close()
    assert rows(path, "SELECT count(*) FROM verdicts") == [(1,)]


def test_what_was_flushed_survives_kill_9(path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from rollyard.events import Admit
from rollyard.journal.journal import Journal
from tests.journal.records import CAB, RUN, V1, ZY
journal = Journal(Path(sys.argv[1]), RUN)
journal.record_step([Admit(CAB)])
journal.commit_checkpoint(V1, "checkpoints/1", 1, {"trained": 1}).result(60)
journal.record_step([Admit(ZY)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, str(path)], cwd=Path(__file__).parents[2], timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert rows(path, "SELECT group_id FROM prompts") == [(0,)]
    ((folder, cursor, counters),) = rows(path, "SELECT folder, prompt_cursor, counters FROM checkpoints")
    assert (folder, cursor, json.loads(str(counters))) == ("checkpoints/1", 1, {"trained": 1})


def test_a_checkpoint_is_synced_in_full_and_other_writes_are_not(path: Path) -> None:
    journal = Journal(path, RUN)
    levels: list[str] = []
    journal._connection.set_trace_callback(levels.append)
    journal.record_step([Admit(CAB)])
    journal.flush()
    journal.commit_checkpoint(V1, "checkpoints/1", 1, {}).result(60)
    shown = [line for line in levels if line.startswith(("PRAGMA", "COMMIT"))]
    assert shown == ["COMMIT", "PRAGMA synchronous = FULL", "COMMIT", "PRAGMA synchronous = NORMAL"]
    assert journal._connection.execute("PRAGMA synchronous").fetchone() == (1,)  # 1 is NORMAL
    journal.close()


def test_nobody_waits_while_a_checkpoint_is_written_and_the_order_stays(path: Path) -> None:
    now = 0.0
    journal = Journal(path, RUN, timer=lambda: now)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    now = 1.0
    journal.record_step([Admit(CAB)])
    journal.tick()  # waits for the other
    journal.record_step([Score(CAB, GOOD.completion)])
    named = journal.commit_checkpoint(V1, "checkpoints/1", 1, {})
    now = 2.0
    journal.record_step([Scored(0, 0, GOOD.reward)])
    journal.tick()
    assert not named.done()
    other.execute("ROLLBACK")
    other.close()
    named.result(10)
    journal.close()
    assert rows(path, "SELECT count(*) FROM verdicts JOIN completions USING (incarnation, group_id, member), checkpoints") == [
        (1,)
    ]


def test_after_a_step_that_could_not_be_written_no_checkpoint_counts(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.record_step([Admit(Prompt(0, 0, (2**31,), ""))])
    with pytest.raises(JournalError, match="Admit of prompt 0"):
        journal.flush()
    for _ in range(2):
        with pytest.raises(JournalError, match="Admit of prompt 0"):
            journal.commit_checkpoint(V1, "checkpoints/1", 1, {}).result(10)
    journal.close()
    assert rows(path, "SELECT count(*) FROM checkpoints") == [(0,)]


def test_opening_again_begins_the_next_incarnation_which_may_train_a_step_again(path: Path) -> None:
    for life in (0, 1):
        journal = Journal(path, RUN)
        assert journal.incarnation == life
        journal.record_step(ENTRIES)
        journal.close()
    assert rows(path, "SELECT incarnation, step FROM batches") == [(0, 0), (1, 0)]
    assert rows(path, "SELECT incarnation, group_id, member FROM rollouts WHERE trained_step = 0 ORDER BY 1, 2, 3") == [
        (0, 0, 0),
        (0, 0, 1),
        (1, 0, 0),
        (1, 0, 1),
    ]


def test_a_reward_that_is_not_finite_is_no_verdict_and_says_so(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.record_step((Admit(CAB), Score(CAB, GOOD.completion), Scored(0, 0, Reward(float("inf")))))
    journal.close()
    assert rows(path, "SELECT value, problem FROM verdicts") == [(None, "the reward is inf")]


def test_odd_texts_are_kept(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.record_step([Admit(Prompt(0, 0, (), "nul \0 and \ud800", {"when": object}))])
    journal.close()
    assert rows(path, "SELECT text, columns FROM prompts") == [
        ("nul \0 and \\ud800", json.dumps({"when": "<class 'object'>"})),
    ]


# ---------------------------------------------------------------------------------------------- failures


def test_a_full_disk_is_an_error_that_names_the_file_and_loses_no_row(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.record_step([Admit(Prompt(0, 0, tuple(range(100_000)), "long"))])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(JournalError, match=r"journal\.sqlite: .*(full|disk I/O)"):
            journal.commit_checkpoint(V1, "checkpoints/1", 1, {}).result(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert rows(path, "SELECT count(*) FROM prompts") == [(0,)]
    journal.close()
    assert rows(path, "SELECT count(*) FROM prompts") == [(1,)]
    assert rows(path, "SELECT count(*) FROM checkpoints") == [(0,)]  # it was refused: the caller knows


def test_a_locked_file_is_an_error_after_the_time_limit(path: Path) -> None:
    journal = Journal(path, RUN, busy_s=0.05)
    journal.record_step([Admit(CAB)])
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(JournalError, match=r"journal\.sqlite: database is locked"):
        journal.flush()
    other.execute("ROLLBACK")
    other.close()
    journal.close()
    assert rows(path, "SELECT group_id FROM prompts") == [(0,)]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write anywhere")
def test_a_read_only_folder_is_an_error(path: Path) -> None:
    path.parent.chmod(0o500)
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        Journal(path, RUN)


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"nowhere/journal\.sqlite: unable to open"):
        Journal(tmp_path / "nowhere" / "journal.sqlite", RUN)


def test_a_broken_file_is_an_error(path: Path) -> None:
    path.write_bytes(b"no database, but long enough to look like one" * 100)
    with pytest.raises(JournalError, match=r"journal\.sqlite: file is not a database"):
        Journal(path, RUN)


def test_another_program_s_database_is_left_alone(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE theirs (x)")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(JournalError, match="not a Rollyard journal"):
        Journal(path, RUN)
    assert path.read_bytes() == before


def test_a_newer_format_is_refused(written: Path) -> None:
    connection = sqlite3.connect(written)
    connection.execute("PRAGMA user_version = 9")
    connection.close()
    with pytest.raises(JournalError, match="format 9, this version of Rollyard knows format 3"):
        Journal(written, RUN)


def test_a_record_that_contradicts_the_others_is_refused(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.record_step([Admit(CAB)])
    journal.flush()
    journal.record_step([Admit(CAB)])
    with pytest.raises(JournalError, match="UNIQUE"):
        journal.flush()
    journal._rows.tables["prompts"].clear()
    journal.record_step([Scored(0, 0, Reward(1.0))])
    with pytest.raises(JournalError, match="FOREIGN KEY"):
        journal.flush()
    journal._rows.tables["verdicts"].clear()
    journal.close()


def test_a_version_of_weights_keeps_its_own_incarnation(path: Path) -> None:
    Journal(path, RUN).close()
    journal = Journal(path, RUN)
    journal.commit_checkpoint(WeightVersion(8, 0), "checkpoints/8", 256, {}).result(60)
    journal.close()
    assert rows(path, "SELECT incarnation, version_step, version_incarnation FROM checkpoints") == [(1, 8, 0)]
