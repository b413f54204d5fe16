"""A power cut at any moment of a small run, and of two jobs that share a folder. And that each sync, each transaction and each
order of things is needed: without it a check fails."""

from __future__ import annotations

import ast
import json
import os
import random
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from rollyard.environment import compiler_command
from rollyard.errors import JournalError, RollyardError
from rollyard.inspect.source import Source
from rollyard.journal.folder import RunFolder
from rollyard.journal.journal import Journal
from rollyard.journal.reader import JournalReader
from rollyard.types import WeightVersion
from tests.compiler import needs_compiler
from tests.durability.checks import NEXT, Learnt, check_jobs, check_resumed, check_run
from tests.durability.disk import ARRIVED, Cut, Disk, Op, Record, below, cuts, read_records, read_tree, write_tree
from tests.durability.recorded import ORDERS, PACKAGE, STEPS, watched
from tests.sources import modules, text, tree

pytestmark = [needs_compiler, pytest.mark.skipif(sys.platform != "linux", reason="what is preloaded is written for Linux")]

SAMPLE = 42  # cuts of each recording in the ordinary lane
CHECKS: dict[str, Callable[[Path, Sequence[str], Learnt], None]] = {"jobs": check_jobs, "run": check_run}
LAST = {"run": f"deep/run/checkpoints/step-{STEPS:06d}-life-1/learnt.json", "jobs": f"shared/weights/{STEPS:06d}/lineage.json"}


@dataclass(frozen=True, slots=True)
class Recording:
    """What one of them did to its folder."""

    name: str
    folder: Path
    records: list[Record]

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    def check(self, cut: Cut, folder: Path) -> None:
        """Raises AssertionError, or whatever is raised of a folder that cannot be read."""
        shutil.rmtree(folder, ignore_errors=True)
        write_tree(cut.tree, folder)
        learnt = json.loads((self.folder / LAST[self.kind]).read_text())
        CHECKS[self.kind](folder, cut.marks, learnt)

    def problem(self, cut: Cut, folder: Path) -> str:
        """What a check says; nothing when all is well."""
        try:
            self.check(cut, folder)
        except (AssertionError, RollyardError, OSError, ValueError, LookupError, sqlite3.Error) as error:
            return f"cut at {cut.at}, {cut.arrived} arrived: {type(error).__name__} {error}"
        return ""


# ---------------------------------------------------------------------------------------- where it is asked for


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """All calls in a module, with the innermost function that each is in."""

    def walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield function, child
            inner = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            yield from walk(child, inner)

    yield from walk(tree(path), "")


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def syncs() -> list[str]:
    """Calls for a sync, in all of the package: file, function and line."""
    found = []
    for path in modules():
        own = path.name == "durable.py"
        if not own and "from rollyard.durable import" not in text(path):
            continue
        for function, call in calls(path):
            if called(call) in ("fsync", "fdatasync", "sync") and not (own and function == "sync"):
                found.append(f"{path.relative_to(PACKAGE)}:{function}:{call.lineno}")
    return [each for each in found if not each.startswith("bench/")]  # which measures how long one takes


def statements(word: str) -> list[str]:
    """Functions that execute a statement with this in it, or that have one executed around theirs, but in the service."""
    found = set()
    for path in modules():
        if "sqlite3" not in text(path) or path.parent.name == "serve":  # whose store has tests of its own
            continue
        for function, call in calls(path):
            quoted = "".join(
                each.value for each in ast.walk(call) if isinstance(each, ast.Constant) and isinstance(each.value, str)
            )
            if (called(call) == "_transaction" and word == "BEGIN IMMEDIATE") or (
                called(call).startswith("execute") and word in quoted and function != "_transaction"
            ):
                found.add(function)
    return sorted(found)


WRITING = statements("BEGIN IMMEDIATE")
WRONG = [f"run:transaction={name}" for name in WRITING if name != "_begin_life"]  # which has a test of its own
WRONG += [f"run:full={name}" for name in statements("synchronous = FULL")]


# ------------------------------------------------------------------------------------------------- recordings


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("recorder") / "recorder.so"
    command = [*shlex.split(compiler_command()), "-x", "c", "-O1", "-shared", "-fPIC", "-o", str(made)]
    done = subprocess.run([*command, str(Path(__file__).with_name("recorder.c"))], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return made


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """In memory where that can be: what is synced there is synced at once."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder).resolve()


Make = Callable[[Sequence[str]], dict[str, Recording]]


@pytest.fixture(scope="module")
def record(recorder: Path, scratch: Path) -> Make:
    """Recordings of these names, all by one process."""

    def make(names: Sequence[str]) -> dict[str, Recording]:
        top = Path(tempfile.mkdtemp(dir=scratch))
        root, log = top / "root", top / "log"
        root.mkdir()
        variables = {"LD_PRELOAD": str(recorder), "RECORD_ROOT": str(root), "RECORD_LOG": str(log)}
        command = [sys.executable, "-m", "tests.durability.recorded", str(root), *names]
        done = subprocess.run(command, env=os.environ | variables, cwd=PACKAGE.parent, capture_output=True, text=True, timeout=50)
        assert done.returncode == 0, done.stderr
        records = list(read_records(log))
        return {name: Recording(name, root / name, below(records, root / name)) for name in names}

    return make


@pytest.fixture(scope="module")
def recordings(record: Make) -> dict[str, Recording]:
    return record([*CHECKS, *WRONG])


@pytest.mark.parametrize("kind", CHECKS)
def test_the_recording_has_all_that_was_done(recordings: dict[str, Recording], kind: str) -> None:
    disk = Disk()
    for record in recordings[kind].records:
        if record.op is not Op.MARK:
            disk.play(record)
    assert {name: content for name, content in disk.seen().items() if not name.endswith("-shm")} == read_tree(
        recordings[kind].folder
    )


# ------------------------------------------------------------------------------------------------ what is lost


@pytest.mark.parametrize("kind", CHECKS)
def test_a_power_cut_takes_nothing_that_was_there(recordings: dict[str, Recording], kind: str, scratch: Path) -> None:
    """At some of all moments."""
    for cut in some_cuts(recordings[kind], SAMPLE):
        recordings[kind].check(cut, scratch / "cut")


def test_a_run_goes_on_after_a_power_cut(recordings: dict[str, Recording], scratch: Path) -> None:
    resume_some(recordings["run"], scratch / "cut", 7)


@pytest.mark.slow
def test_a_run_goes_on_after_many(recordings: dict[str, Recording], scratch: Path) -> None:
    resume_some(recordings["run"], scratch / "cut", 70)


def resume_some(recording: Recording, folder: Path, count: int) -> None:
    for cut in some_cuts(recording, count):
        recording.check(cut, folder)
        check_resumed(folder)


def some_cuts(recording: Recording, count: int) -> Iterator[Cut]:
    """About so many, of all kinds: the same moments in each run of the tests."""
    number = random.Random(count)
    for arrived in ARRIVED:
        moments = {number.randrange(len(recording.records)) for _ in range(count // len(ARRIVED))}
        yield from cuts(recording.records, [arrived], moments.__contains__)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CHECKS)
@pytest.mark.parametrize("arrived", ARRIVED)
def test_a_power_cut_at_every_moment(recordings: dict[str, Recording], kind: str, arrived: str, scratch: Path) -> None:
    """Where only some things arrived, every second: each has others."""
    every = 2 if arrived.startswith("some") else 1
    for cut in cuts(recordings[kind].records, [arrived], lambda at: at % every == 0):
        recordings[kind].check(cut, scratch / "cut")


# ----------------------------------------------------------------------------------------- and what is needed


@pytest.mark.parametrize("site", syncs())
def test_each_sync_is_needed(recordings: dict[str, Recording], site: str, scratch: Path) -> None:
    """Were it not there, a cut would be seen."""
    assert any(record.other == site for each in recordings.values() for record in each.records), "no run comes there"
    assert any(found_out(recordings[kind], scratch, lambda record: record.other == site) for kind in CHECKS), (
        "nobody would miss it"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["journal.sqlite", "journal.sqlite-wal", "run"])
def test_those_of_sqlite_are_needed(recordings: dict[str, Recording], name: str, scratch: Path) -> None:
    """Of the file, its log, and the folder that both are in."""
    mine = f"deep/run/{name}" if name != "run" else "deep/run"
    assert found_out(recordings["run"], scratch, lambda record: not record.other and record.path == mine)


def found_out(recording: Recording, scratch: Path, ignored: Callable[[Record], bool] | None = None) -> bool:
    """Does a check fail of some cut? Where a sync is ignored the first few cuts tell; else one kind of them."""
    kinds = [list(ARRIVED)] if ignored is not None else [[name] for name in ARRIVED]
    return any(
        recording.problem(cut, scratch / "cut") for kind in kinds for cut in cuts(recording.records, kind, ignored=ignored)
    )


@pytest.mark.parametrize("name", WRONG)
def test_each_transaction_is_needed(recordings: dict[str, Recording], name: str, scratch: Path) -> None:
    """And that what names a checkpoint is synced."""
    assert found_out(recordings[name], scratch), "nobody would miss it"


@contextmanager
def connecting(folder: Path, fault: str) -> Iterator[None]:
    """With connections that do this wrong."""
    connection, connect = watched(folder, fault), sqlite3.connect
    with mock.patch.object(sqlite3, "connect", lambda *given, **named: connect(*given, factory=connection, **named)):
        yield


def test_a_life_that_begins_is_not_overtaken(tmp_path: Path) -> None:
    """The one transaction that a power cut does not miss: another process may come between what it reads and what it writes."""

    def begin(name: str) -> int:
        def clock() -> float:
            with suppress(JournalError):
                Journal(tmp_path / name, NEXT, busy_s=0.0).abandon()
            return 0.0

        life = Journal(tmp_path / name, NEXT, clock=clock)
        life.close()
        return life.incarnation

    assert begin("whole") == 0
    with connecting(tmp_path, "transaction=_begin_life"), pytest.raises(JournalError, match="UNIQUE"):
        begin("torn")


def test_what_is_read_is_of_one_moment(tmp_path: Path) -> None:
    """Transactions that only read."""

    def still(rows: Callable[[str], Iterator[tuple[int]]]) -> bool:
        before = list(rows(COUNT))
        life.record_evaluation(WeightVersion(1), 0.5, 1)
        life.flush()
        return list(rows(COUNT)) == before

    def check() -> bool:
        with JournalReader(run.journal) as reader, reader.still():
            return still(reader.query)

    def inspect() -> bool:
        with Source(run) as source:
            return still(source.rows)

    reading, run = {"still": check, "_begin": inspect}, RunFolder(tmp_path)
    assert set(reading) == set(statements("BEGIN")) - set(WRITING)
    life = Journal(run.journal, NEXT)
    for function, looked in reading.items():
        assert looked()
        with connecting(tmp_path, f"transaction={function}"):
            assert not looked()
    life.close()


COUNT = "SELECT count(*) FROM evaluations"


@pytest.mark.slow
def test_each_order_is_needed(record: Make, scratch: Path) -> None:
    for name, recording in record(list(ORDERS)).items():
        assert found_out(recording, scratch), f"nobody would mind {name}"
