import sqlite3
from pathlib import Path

import pytest

from rollyard.errors import JournalError
from rollyard.events import Admit
from rollyard.journal.journal import Journal
from rollyard.journal.reader import JournalReader, has_lives
from rollyard.types import Group, WeightVersion
from tests.journal.records import CAB, ENTRIES, GOOD, MUTE, POOR, RUN, V0, V1, ZY


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
        with pytest.raises(JournalError, match="prompt 2 was not admitted"):
            reader.group(2)


def test_a_running_journal_can_be_read_and_never_written(path: Path) -> None:
    journal = Journal(path, RUN)
    with JournalReader(path) as reader:
        assert list(reader.query("SELECT group_id FROM prompts")) == []
        journal.record_step([Admit(CAB)])
        journal.flush()
        assert list(reader.query("SELECT group_id FROM prompts")) == [(0,)]
        assert reader.incarnation.failed is None
        with pytest.raises(JournalError, match="readonly"):
            list(reader.query("DELETE FROM prompts"))
    journal.close()


def test_the_newest_incarnation_is_read_unless_asked(path: Path) -> None:
    write(path)
    journal = Journal(path, RUN)
    journal.commit_checkpoint(WeightVersion(2, 1), "checkpoints/2", 3, {}).result(60)
    journal.close()
    with JournalReader(path) as reader:
        assert reader.incarnation.incarnation == 1 and reader.batches() == {}
        assert [life.incarnation for life in reader.incarnations()] == [0, 1]
    with JournalReader(path, incarnation=0) as reader:
        assert reader.incarnation.incarnation == 0 and reader.batches() == {0: (0,)}
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
