"""Whoever looks leaves no trace, whatever state the folder is in."""

from __future__ import annotations

import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rollyard.errors import ConfigError, JournalError
from rollyard.inspect.source import Lives, Source, find, goes_on, read_config, read_metrics
from rollyard.journal.folder import RunFolder
from rollyard.journal.quiet import connect
from rollyard.types import WeightVersion
from tests.inspect.runs import first_life, second_life, write_run

PROMPTS = "SELECT count(*) FROM prompts"


def contents(folder: Path) -> dict[str, bytes]:
    """Of every file, but for SQLite's index of its log, which it makes anew when it was left by a writer that was killed."""
    return {path.name: b"" if path.name.endswith("-shm") else path.read_bytes() for path in folder.iterdir() if path.is_file()}


def counted(path: Path) -> int:
    connection = connect(path)
    try:
        (count,) = connection.execute(PROMPTS).fetchone()
        return int(count)
    finally:
        connection.close()


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The journal of a run that was killed: its log was never folded in."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "there").mkdir()
    journal = first_life(tmp_path / "there" / "journal.sqlite")
    for file in (tmp_path / "there").iterdir():
        shutil.copy(file, kept)
    journal.close()
    return kept / "journal.sqlite"


def test_a_run_that_ended_leaves_one_file_and_it_stays_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    before = contents(folder.path)
    assert counted(folder.journal) == 6 and contents(folder.path) == before
    assert "journal.sqlite-shm" not in before


def test_a_run_that_was_killed_is_read_with_its_log(killed: Path) -> None:
    before = contents(killed.parent)
    assert set(before) == {"journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm"}
    assert counted(killed) == 4 and contents(killed.parent) == before


def test_a_copy_without_the_index_gets_none(killed: Path) -> None:
    killed.with_name("journal.sqlite-shm").unlink()
    before = contents(killed.parent)
    assert counted(killed) == 4 and contents(killed.parent) == before


def test_a_run_that_goes_on_is_read_as_far_as_it_is_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    first_life(folder.journal).close()
    journal = second_life(folder.journal)
    with Source(folder) as source:
        assert source.row(PROMPTS) == (6,)
        journal.record_evaluation(WeightVersion(3, 1), 0.5, samples=1)
        journal.flush()  # nobody is in its way
        assert source.row("SELECT count(*) FROM evaluations") == (1,), "as it was at one moment"
        source.check_unchanged()
    with Source(folder) as source:
        assert source.row("SELECT count(*) FROM evaluations") == (2,)
    journal.close()


@pytest.fixture
def sealed(killed: Path) -> Iterator[Path]:
    """A folder in which nothing can be written, not even by SQLite."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name) / "run"
        shutil.copytree(killed.parent, place)
        Path(name).chmod(0o755)
        for path in (*place.iterdir(), place):
            path.chmod(0o555 if path.is_dir() else 0o444)
        yield place / "journal.sqlite"
        place.chmod(0o755)


@pytest.mark.parametrize("left", ["log and index", "log", "neither"])
def test_a_folder_that_may_only_be_read(sealed: Path, left: str) -> None:
    """The superuser may write anywhere, so the reader is nobody."""
    sealed.parent.chmod(0o755)
    if left == "neither":
        folded = sqlite3.connect(f"file:{sealed}", uri=True)
        sealed.chmod(0o644)
        folded.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        folded.close()
    if left != "log and index":
        sealed.with_name("journal.sqlite-shm").unlink(missing_ok=True)
    sealed.parent.chmod(0o555)
    before = contents(sealed.parent)
    child = os.fork()
    if child == 0:
        if os.geteuid() == 0:
            os.setresuid(65534, 65534, 65534)
        os._exit(counted(sealed))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert contents(sealed.parent) == before


def test_what_was_taken_for_settled_and_is_not_is_told(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with Source(folder) as source:
        source.check_unchanged()
        os.utime(folder.journal, ns=(1, 1))
        with pytest.raises(JournalError, match="ask again"):
            source.check_unchanged()


def test_names_that_mean_something_in_an_address(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a run?mode=rwc&x#%20")
    assert counted(folder.journal) == 6


def test_what_is_no_run_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        find(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not the folder of a run"):
        find(tmp_path)
    (tmp_path / "agreed").mkdir()
    with pytest.raises(ConfigError, match="generation job's own folder"):
        find(tmp_path)
    folder = write_run(tmp_path / "run")
    assert find(folder.journal) == find(folder.path) == folder
    with pytest.raises(ConfigError, match="no such folder"):
        find(folder.metrics)


def test_a_run_without_a_journal_and_one_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(JournalError, match="did not come so far"):
        Source(find(tmp_path))
    (tmp_path / "journal.sqlite").touch()
    with pytest.raises(JournalError, match="did not come so far"):
        Source(find(tmp_path))
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as theirs:
        theirs.execute("CREATE TABLE theirs (x)")
    with pytest.raises(JournalError, match="not a Rollyard journal"):
        Source(find(tmp_path))


@pytest.mark.parametrize(
    "sql",
    [
        "DELETE FROM prompts",
        "DELETE FROM prompts RETURNING text",
        "UPDATE sqlite_master SET sql = ''",
        "ATTACH 'stolen.db' AS x",
        "VACUUM INTO 'stolen.db'",
        "PRAGMA journal_mode = DELETE",
        "CREATE TEMP TABLE x (y)",
        "SELECT 1; SELECT 2",
        "SELECT nothing FROM prompts",
        "",
    ],
)
def test_sql_that_does_more_than_read_is_refused(tmp_path: Path, sql: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_run(tmp_path / "run")
    before = contents(folder.path)
    with Source(folder) as source, pytest.raises(ConfigError, match="give one SELECT"):
        source.only_read(sql)
    assert contents(folder.path) == before and not (tmp_path / "stolen.db").exists()


def test_who_holds_the_folder_is_seen_and_not_disturbed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert not goes_on(folder)
    handle = os.open(folder.path, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert goes_on(folder)
    os.close(handle)
    assert not goes_on(folder)


def test_a_folder_of_the_same_number_elsewhere_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = tmp_path.stat()
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    locks = {
        f"{device}:{found.st_ino}": True,
        f"fe:7f:{found.st_ino}": False,
        f"{device}:{found.st_ino}1": False,
    }
    read = Path.read_text
    for lock, held in locks.items():
        shown = f"1: FLOCK  ADVISORY  WRITE 7 {lock} 0 EOF\n"
        monkeypatch.setattr(
            Path, "read_text", lambda path, shown=shown, **how: shown if path.name == "locks" else read(path, **how)
        )
        assert goes_on(RunFolder(tmp_path)) == held, lock


def test_files_beside_it_that_are_damaged_are_no_more_than_that(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_config(folder) is None and read_metrics(folder, Lives()).lines == ()
    folder.config.write_bytes(b"\xff[run")
    folder.metrics.write_bytes(b'{"step": 1}\n[1]\n\xff\n{"step": "1", "incarnation": 0}\n' + b"[" * 100_000 + b"\n")
    assert read_config(folder) is None
    assert (read_metrics(folder, Lives()).lines, read_metrics(folder, Lives()).broken) == ((), 5)
