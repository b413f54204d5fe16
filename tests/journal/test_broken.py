"""Disks that are full and files that are broken: one clear error, and what was written before is there."""

import shutil
import sqlite3
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import rollyard
from rollyard.bench import virtual
from rollyard.bench.placements import config_of
from rollyard.errors import JournalError
from rollyard.events import Admit, BatchTrained, Event, Instruction, Rollover
from rollyard.journal.check import Kind, check_journal
from rollyard.journal.journal import Journal
from rollyard.journal.reader import JournalReader
from rollyard.journal.recover import read_past
from rollyard.types import Prompt
from tests.journal.records import RUN, V1
from tests.journal.test_recover import Life, complete, group_of, past, prompt, rollout, wrote
from tests.resuming import Life as Written
from tests.resuming import stations, work


def big(group: int) -> list[Event | Instruction]:
    return [Admit(Prompt(group, group, tuple(range(200_000)), "long"))]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_ends_with_an_error_and_loses_nothing_that_was_written(small: Path) -> None:
    path = small / "journal.sqlite"
    life = Life(path)
    life.step(*complete(group_of(0)))
    life.train(0, 0)
    life.checkpoint(V1)
    before = past(path)
    life.step(*big(1), *big(2), *big(3))
    for _ in range(2):
        with pytest.raises(JournalError, match=r"journal\.sqlite: (database or disk is full|disk I/O error)"):
            life.journal.flush()
    life.journal.abandon()
    assert past(path) == before
    assert check_journal(path, lambda folder: True).tables


def test_once_there_is_room_again_all_of_it_is_written(small: Path) -> None:
    filler = small / "filler"
    filler.write_bytes(b"x" * 1_200_000)
    life = Life(small / "journal.sqlite")
    life.step(*big(1))
    with pytest.raises(JournalError, match=r"full|I/O"):
        life.journal.flush()
    filler.unlink()
    life.journal.close()
    with JournalReader(small / "journal.sqlite") as reader:
        assert list(reader.query("SELECT count(*) FROM prompts")) == [(1,)] and reader.incarnation.begun is not None


def test_a_file_that_may_not_grow_is_an_error(tmp_path: Path) -> None:
    """SQLite's own limit stands for a full disk where nothing can be mounted."""
    life = Life(tmp_path / "journal.sqlite")
    life.step(*complete(group_of(0)))
    life.journal.flush()
    life.journal._connection.execute("PRAGMA max_page_count = 60")
    life.step(*big(1))
    with pytest.raises(JournalError, match=r"journal\.sqlite: database or disk is full"):
        life.journal.flush()
    life.journal.abandon()
    assert past(tmp_path / "journal.sqlite").recovered.groups == (group_of(0),)


def test_a_step_that_cannot_be_written_whole_is_not_written_at_all(tmp_path: Path) -> None:
    life = Life(tmp_path / "journal.sqlite")
    life.step(*complete(group_of(0)))
    life.journal.flush()
    life.step(*complete(group_of(1)), wrote(1, 0, (2,)), Admit(prompt(0)))  # the last contradicts what is there
    with pytest.raises(JournalError, match="UNIQUE"):
        life.journal.flush()
    life.journal.abandon()
    assert past(tmp_path / "journal.sqlite").recovered.groups == (group_of(0),)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "journal.sqlite"
    life = Life(path)
    for id_ in range(40):
        life.step(*complete(group_of(id_)))
    life.step(Admit(prompt(40)), wrote(40, 0, (1, 2)))
    life.kill()
    return path


def test_without_its_log_a_journal_is_what_it_was_when_that_was_folded_in_last(path: Path) -> None:
    life = Life(path)
    life.step(Admit(prompt(50)), wrote(50, 1, (3,)))
    life.journal.flush()
    copy = path.with_name("copy.sqlite")
    shutil.copy(path, copy)  # and not its log
    life.journal.abandon()
    assert past(copy).lives == 1 and len(past(copy).recovered.groups) == 40
    assert past(path).lives == 2


def test_a_row_that_the_disk_has_changed_is_written_anew_and_that_is_told(path: Path) -> None:
    content = path.read_bytes()
    place = content.index(rollout(27, 1).completion.text.encode())
    path.write_bytes(content[:place] + b"8" + content[place + 1 :])
    with pytest.warns(RuntimeWarning, match="the completion of prompt 27, member 1 of life 0 is damaged; it is written anew"):
        found = past(path)
    assert 27 not in {group.id for group in found.recovered.groups}
    (begun,) = (begun for begun in found.recovered.begun if begun.group == 27)
    assert begun.rollouts == (rollout(27, 0),)
    with JournalReader(path) as reader, pytest.raises(JournalError, match="prompt 27, member 1"):
        reader.group(27)


@pytest.mark.parametrize("page", range(1, 12))
def test_a_page_of_noise_is_an_error_or_is_left_out_and_is_found(path: Path, page: int) -> None:
    content, size = bytearray(path.read_bytes()), 4096
    assert len(content) > 12 * size
    content[page * size : (page + 1) * size] = bytes((37 * index + 11) % 256 for index in range(size))
    path.write_bytes(content)
    found = check_journal(path, lambda folder: True)
    assert {finding.kind for finding in found.findings} & {Kind.UNREADABLE, Kind.BROKEN, Kind.DAMAGED}
    try:
        left = read_past(path, lambda folder: True)
    except JournalError as error:
        assert "journal.sqlite" in str(error)
    else:
        assert all(group == group_of(group.id) for group in left.recovered.groups)


def test_a_truncated_file_is_an_error(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(JournalError, match=r"journal\.sqlite: database disk image is malformed"):
        past(path)


def test_a_journal_that_cannot_be_locked_for_reading_is_an_error(path: Path) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN IMMEDIATE")
    other.execute("DELETE FROM partials")
    other.execute("ROLLBACK")
    try:
        with pytest.raises(JournalError, match=r"journal\.sqlite: database is locked"):
            Journal(path, RUN, busy_s=0.05)
    finally:
        other.close()


class Full(Journal):
    """Its disk has no room any more once the first batch was trained."""

    def record_step(self, entries: Iterable[Event | Instruction]) -> None:
        entries = tuple(entries)
        super().record_step(entries)
        if any(isinstance(entry, BatchTrained) for entry in entries):
            self._connection.execute("PRAGMA max_page_count = 1")
            super().record_step(big(10_000))


def test_a_run_ends_when_its_journal_cannot_be_written_and_says_so_once(tmp_path: Path) -> None:
    of = work()
    config = config_of("separate", Rollover.DRAIN, of, tmp_path)
    length = of.length
    run = rollyard.Run(config, stations=lambda past: stations(past, Written(), tmp_path, of, 1000, length), journal=Full)

    async def steps() -> int:
        return len([step async for step in run])

    with pytest.warns(RuntimeWarning) as warned, pytest.raises(JournalError, match=r"journal\.sqlite: database or disk is full"):
        virtual.run(steps())
    assert run.report is not None and run.report.finished.failed
    assert "journal.sqlite: database or disk is full" in run.report.finished.cause
    assert len([each for each in warned if "full" in str(each.message)]) <= 1  # what was learnt since is not saved
