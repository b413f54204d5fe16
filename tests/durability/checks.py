"""What must be true of a folder after a power cut, whenever that came."""

from __future__ import annotations

import json
import sqlite3
import tomllib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from rollyard.bench import virtual
from rollyard.checkpoints import Whole
from rollyard.durable import check_whole
from rollyard.exchange.agreed import AGREED, agree
from rollyard.exchange.files import read_whole
from rollyard.exchange.folder import WRITES, Folder, Job
from rollyard.journal import check
from rollyard.journal.folder import RunFolder, age
from rollyard.journal.journal import Journal, RunRecord
from rollyard.journal.reader import has_lives
from rollyard.resume import left_by
from tests.durability.recorded import GROUPS, SIZE, STEPS, ballast, go, resumed, rows

Learnt = Sequence[Sequence[int]]  # prompts of each batch

NEXT = RunRecord("run", "0", 0, SIZE, "{}")


def told(marks: Sequence[str], what: str) -> list[list[str]]:
    return [words for words in (mark.split() for mark in marks) if words[0] == what]


def check_run(folder: Path, marks: Sequence[str], learnt: Learnt) -> None:
    """The journal opens and holds whole transactions; what was named is there, whole; all else that has a name is whole, too."""
    run, named = folder / "deep" / "run", told(marks, "named")
    if not run.exists():
        assert not named
        return
    assert tomllib.loads((run / "config.toml").read_text())["run"]["steps"] in (STEPS // 2, STEPS)
    for found in (run / "checkpoints").iterdir():
        if not found.name.startswith("."):
            check_checkpoint(found, age(found)[0], learnt)
    for name in ("report.json", "trace.json"):
        if (run / name).exists():
            json.loads((run / name).read_text())
    check_past(run, int(named[-1][1]) if named else 0, learnt)
    check_metrics(run / "metrics.jsonl", int(named[-1][1]) if named else 0)
    check_journal(run / "journal.sqlite", marks, named)
    if has_lives(run / "journal.sqlite"):
        whole = Whole(run)
        checked = check.check_journal(run / "journal.sqlite", lambda name: whole(name) if (run / name).is_dir() else None)
        assert not checked.findings
    life = Journal(run / "journal.sqlite", NEXT)
    life.close()


def check_checkpoint(folder: Path, step: int, learnt: Learnt) -> None:
    assert json.loads((folder / "learnt.json").read_text()) == list(learnt[:step])
    assert (folder / "ballast").read_bytes() == ballast(step)


def check_journal(path: Path, marks: Sequence[str], named: Sequence[object]) -> None:
    """It holds what one of its transactions left, and none before the last checkpoint that was named."""
    commits = [words[1] for words in told(marks, "commits")]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert not connection.execute("PRAGMA foreign_key_check").fetchall()
        if not connection.execute("SELECT * FROM sqlite_master").fetchall():
            assert not named
            return
        found = rows(connection)
        for (folder,) in connection.execute("SELECT folder FROM checkpoints ORDER BY rowid DESC LIMIT 1"):
            assert (path.parent / folder).is_dir(), "what is named last is there"
    last = max((at for at, mark in enumerate(marks) if mark.startswith("named ")), default=0)
    before = len(told(marks[:last], "commits"))
    assert found in commits[max(before - 1, 0) :], "no transaction left that"


def check_metrics(path: Path, least: int) -> None:
    """They have all steps up to the last checkpoint that was named."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    assert [json.loads(line)["step"] for line in lines[:least]] == list(range(1, least + 1))


def check_past(run: Path, least: int, learnt: Learnt) -> None:
    """What the next life is given."""
    try:
        past = left_by(RunFolder(run), STEPS)
    except RuntimeWarning as told:  # of something that is missing, which no cut may bring about
        raise AssertionError(str(told)) from told
    assert past.version.step >= least
    if past.checkpoint:
        check_checkpoint(run / past.checkpoint, past.version.step, learnt)
    assert past.done >= {id_ for batch in learnt[: past.version.step] for id_ in batch}
    batches, recovered = past.recovered.batches, past.recovered.groups
    ids = [[group.id for group in batch] for batch in batches]
    assert ids == [list(batch) for batch in learnt[past.version.step :]][: len(ids)]
    assert all(len(group.rollouts) == SIZE for batch in (*batches, recovered) for group in batch)
    assert all(len(batch) == GROUPS for batch in batches)
    assert not past.done & ({group.id for group in recovered} | {begun.group for begun in past.recovered.begun})


def check_resumed(folder: Path) -> None:
    """A run that goes on from what is there comes to its end, and learns from each prompt once."""
    run = folder / "deep" / "run"
    if not run.exists():
        return
    virtual.run(go(resumed(run)))
    last = max((run / "checkpoints").iterdir(), key=age)
    assert age(last)[0] == STEPS
    ids = [id_ for batch in json.loads((last / "learnt.json").read_text()) for id_ in batch]
    assert len(ids) == len(set(ids)) == STEPS * GROUPS


def check_jobs(folder: Path, marks: Sequence[str], learnt: Learnt) -> None:
    """What two jobs share: what was written is there, nothing has a name before what it stands on."""
    shared = Folder(folder / "shared")
    groups, batches, versions = (told(marks, what) for what in ("group", "batch", "version"))
    if not shared.path.exists():
        assert not groups and not batches and not versions
        return
    shared.make()
    newest, taken = shared.newest(), shared.batches()
    assert (-1 if newest is None else newest) >= max((int(step) for _, step in versions), default=-1)
    for step in shared.versions():
        check_whole(shared.weights(step))
        assert json.loads((shared.weights(step) / "lineage.json").read_text()) == list(learnt[:step])
        assert step == 0 or shared.stats(step).step == step
    assert all(taken[int(step)] == tuple(map(int, ids)) for _, step, *ids in batches)
    for step, ids in taken.items():
        assert list(ids) == learnt[step]
        if step >= (newest or 0):
            assert all(len(shared.group(id_).rollouts) == SIZE for id_ in ids)
    trained = {id_ for step, ids in taken.items() if step < (newest or 0) for id_ in ids}
    there = {shared.group(id_).id for id_ in shared.groups()}
    assert there | trained >= {int(id_) for _, id_ in groups}
    assert shared.done() in (None, STEPS) and (shared.done() is None or newest == STEPS)
    shared.offered()
    for job in Job:
        if (path := shared.path / "agreed" / f"{job}.json").exists():
            agree(shared, job, read_whole(path, AGREED))
        shared.clear(job)
    assert not [path for parts in WRITES.values() for part in parts for path in (shared.path / part).glob(".*")]
