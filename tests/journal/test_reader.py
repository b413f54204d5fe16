import sqlite3
from pathlib import Path

import pytest

from rollyard.errors import JournalError
from rollyard.events import Admit, Score
from rollyard.journal.journal import Journal
from rollyard.journal.reader import Checkpoint, Counts, Evaluation, JournalReader, has_lives
from rollyard.types import Group, WeightVersion
from tests.journal.records import CAB, ENTRIES, GOOD, MUTE, POOR, RUN, V0, V1, ZY, completion


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def write(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.record_step(ENTRIES)
    journal.record_evaluation(V0, 0.25, samples=4)
    journal.record_evaluation(V1, None, samples=4, unscored=4)
    journal.commit_checkpoint(V1, "checkpoints/1", 2, {"trained": 1}).result(60)
    journal.close()


def test_groups_come_back_as_they_were(path: Path) -> None:
    write(path)
    with JournalReader(path) as reader:
        assert reader.group(0) == Group(CAB, (GOOD, POOR))
        assert reader.group(1) == Group(ZY, (MUTE,))
        assert reader.batches() == {0: (0,)}
        assert reader.trained_steps() == (0,)
        with pytest.raises(JournalError, match="prompt 2 was not admitted"):
            reader.group(2)


def test_everything_else_comes_back(path: Path) -> None:
    write(path)
    with JournalReader(path) as reader:
        assert reader.counts() == Counts(
            admitted=2,
            trained=1,
            dropped={"failed": 1},
            completions=3,
            members_trained=2,
            members_dropped={"failed": 1, "no_verdict": 1},
        )
        assert reader.versions() == (V0, V1)
        assert reader.checkpoints() == (Checkpoint(V1, "checkpoints/1", 2, {"trained": 1}),)
        assert reader.evaluations() == (Evaluation(V0, 0.25, 4, 0), Evaluation(V1, None, 4, 4))
        assert [(e.event, e.version) for e in reader.engine_events()] == [
            ("up", None),
            ("loaded", V0),
            ("request failed", None),
            ("down", None),
        ]
        life = reader.incarnation
        assert (life.incarnation, life.seed, life.config, life.failed) == (0, 7, RUN.config, True)


def test_a_running_journal_can_be_read_and_never_written(path: Path) -> None:
    journal = Journal(path, RUN)
    with JournalReader(path) as reader:
        assert reader.counts().admitted == 0
        journal.record_step([Admit(CAB)])
        journal.flush()
        assert reader.counts().admitted == 1
        assert reader.incarnation.failed is None
        with pytest.raises(JournalError, match="readonly"):
            list(reader.query("DELETE FROM prompts"))
    journal.close()


def test_finished_members_without_a_verdict_are_found(path: Path) -> None:
    journal = Journal(path, RUN)
    journal.record_step((Admit(CAB), Score(CAB, completion(0, 1)), Score(CAB, completion(0, 0))))
    journal.close()
    with JournalReader(path) as reader:
        assert reader.unjudged() == (completion(0, 1), completion(0, 0))


def test_the_newest_incarnation_is_read_unless_asked(path: Path) -> None:
    write(path)
    journal = Journal(path, RUN)
    journal.commit_checkpoint(WeightVersion(2, 1), "checkpoints/2", 3, {}).result(60)
    journal.close()
    with JournalReader(path) as reader:
        assert [point.folder for point in reader.checkpoints()] == ["checkpoints/2"]
        assert [life.incarnation for life in reader.incarnations()] == [0, 1]
    with JournalReader(path, incarnation=0) as reader:
        assert [point.folder for point in reader.checkpoints()] == ["checkpoints/1"]
    with pytest.raises(JournalError, match="no incarnation 2, only 0, 1"):
        JournalReader(path, incarnation=2)


def test_what_is_no_journal_is_an_error(path: Path) -> None:
    with pytest.raises(JournalError, match="no such file"):
        JournalReader(path)
    sqlite3.connect(path).close()
    path.write_bytes(b"")
    with pytest.raises(JournalError, match="not a Rollyard journal"):
        JournalReader(path)
    path.write_bytes(b"x" * 5000)
    with pytest.raises(JournalError, match="not a database"):
        JournalReader(path)


def test_a_journal_in_which_no_run_has_begun(path: Path) -> None:
    class Killed(Exception):
        """The process is no more."""

    def kill(name: str) -> None:
        if name == "before life":
            raise Killed

    with pytest.raises(Killed):
        Journal(path, RUN, at=kill)
    assert not has_lives(path)
    with pytest.raises(JournalError, match="no run has begun in it"):
        JournalReader(path)


def test_a_damaged_journal_is_an_error_when_the_damage_is_read(path: Path) -> None:
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with pytest.raises(JournalError, match=r"journal\.sqlite"):
        JournalReader(path)
