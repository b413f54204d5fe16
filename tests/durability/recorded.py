"""The process that is recorded: small runs with stations that compute nothing, and all else real.

`python -m tests.durability.recorded ROOT NAME ...`

Each name is a folder below ROOT and says what is done there: `run` or `jobs`, and after a colon what is done wrong:

    transaction=FUNCTION   the function's transaction is none: its statements take effect one by one
    full=FUNCTION          what it commits is not synced
    order=WHAT             two things that must follow each other change places
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import json
import os
import sqlite3
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest import mock

from rollyard import checkpoints, durable
from rollyard.bench import doubles, virtual
from rollyard.bench.placements import config_of
from rollyard.bench.theory import Work
from rollyard.events import Rollover
from rollyard.exchange.folder import Folder
from rollyard.journal import journal
from rollyard.journal.folder import RunFolder, keep_newest
from rollyard.journal.journal import Journal
from rollyard.journal.recover import Past
from rollyard.loop import Run
from rollyard.stations import Stations
from rollyard.types import TrainBatch, TrainStats, WeightVersion
from tests.exchange import lives
from tests.resuming import remaining

STEPS, GROUPS, SIZE, KEEP = 4, 2, 2, 1
BALLAST = 3000  # bytes of a checkpoint that say nothing but which one it is

PACKAGE = Path(durable.__file__).parent
library = ctypes.CDLL(None)


def mark(root: Path, text: str) -> None:
    """Of a process that is not recorded nobody hears it."""
    if hasattr(library, "recorder_mark"):
        library.recorder_mark(f"{root}/{text}".encode())


# ------------------------------------------------------------------------------------- who syncs, who commits


def caller(frame: FrameType) -> str:
    """Who called for a sync: file, function and line; of `durable.sync` its caller."""
    if frame.f_code.co_filename == durable.__file__ and frame.f_code.co_name == "sync":
        assert frame.f_back is not None
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}:{frame.f_code.co_name}:{frame.f_lineno}"


def tagging(fsync: Callable[[int], None]) -> Callable[[int], None]:
    def call(handle: int) -> None:
        library.recorder_tag(caller(sys._getframe(1)).encode())
        try:
            fsync(handle)
        finally:
            library.recorder_tag(b"")

    return call


def rows(connection: sqlite3.Connection) -> str:
    """A digest of all that is in the file."""
    names = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
    found = [(name, list(connection.execute(f"SELECT * FROM {name}"))) for name in names]
    return hashlib.blake2b(repr(found).encode(), digest_size=12).hexdigest()


def watched(root: Path, fault: str) -> type[sqlite3.Connection]:
    """A connection whose transactions are marked, with what is in the file after each; or are none."""

    class Connection(sqlite3.Connection):
        def execute(self, sql: str, *given: Any) -> sqlite3.Cursor:
            if sql.startswith("BEGIN") and fault == f"transaction={holder(sys._getframe(1))}":
                return super().execute("SELECT 1")
            if "synchronous = FULL" in sql and fault == f"full={holder(sys._getframe(1))}":
                sql = "PRAGMA synchronous = NORMAL"
            if sql != "COMMIT":
                return super().execute(sql, *given)
            digest = rows(self)  # before it is committed: after that a cut may come at once
            mark(root, f"commits {digest}")
            return super().execute(sql if self.in_transaction else "SELECT 1")

    return Connection


def holder(frame: FrameType | None) -> str:
    """The function whose transaction it is, or whose pragma."""
    while frame is not None and (frame.f_code.co_name == "_transaction" or "contextlib" in frame.f_code.co_filename):
        frame = frame.f_back
    assert frame is not None
    return frame.f_code.co_name


# ----------------------------------------------------------------------------------------------------- the run


def ballast(step: int) -> bytes:
    return hashlib.blake2b(str(step).encode()).digest() * (BALLAST // 64)


class Learner(doubles.DoubleTrainer):
    """Remembers what it learnt from, and writes it as trainers write a checkpoint."""

    def __init__(self, past: Past, run: Path) -> None:
        super().__init__(0.01, doubles.Meter())
        self._version, self._life = past.version, past.lives
        begun = run / past.checkpoint / "learnt.json"
        self._learnt: list[list[int]] = json.loads(begun.read_text()) if past.checkpoint else []

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        self._learnt.append(list(dict.fromkeys(sample.group for shard in shards for sample in shard.samples)))
        found = await super().train(shards)
        self._version = WeightVersion(self._version.step, self._life)
        return found

    async def save(self, folder: Path) -> None:
        def write(draft: Path) -> None:
            (draft / "learnt.json").write_text(json.dumps(self._learnt))
            (draft / "ballast").write_bytes(ballast(len(self._learnt)))

        await asyncio.to_thread(durable.write_folder, folder, write)


WORK = Work(1.0, steps=STEPS, groups=GROUPS, size=SIZE, staleness=1, generate=2, slots=3)


def stations(run: Path) -> Callable[[Past], Stations]:
    def make(past: Past) -> Stations:
        made = doubles.stations("async", WORK, doubles.Meter())
        for publisher in made.publishers.values():
            publisher._offered = replace(publisher._offered, version=past.version)  # type: ignore[attr-defined]
        source = remaining(None, past.done)
        return replace(made, source=source, trainers={None: Learner(past, run)})

    return make


def do_run(root: Path) -> None:
    """Two lives: the first ends after half of the steps, the second often folds the write-ahead log into the file."""
    config, run = config_of("async", Rollover.KEEP, WORK, root), root / "deep" / "run"
    config = config.model_copy(
        update={
            "run": config.run.model_copy(update={"out": str(run), "steps": STEPS // 2}),
            "checkpoint": config.checkpoint.model_copy(update={"every": 1, "keep": KEEP}),
        }
    )

    def committed(written: Journal, version: Any, folder: str, *rest: Any) -> Future[None]:
        done = commit(written, version, folder, *rest)
        done.result(60)
        mark(root, f"named {version.step} {folder}")
        return done

    commit = Journal.commit_checkpoint
    with mock.patch.object(Journal, "commit_checkpoint", committed):
        virtual.run(go(Run(config, stations=stations(run))))
        with mock.patch.object(journal, "LOG_PAGES", 20):
            virtual.run(go(resumed(run)))


def resumed(run: Path) -> Run:
    return Run.resume(run, {"run.steps": STEPS}, stations=stations(run))


async def go(run: Run) -> None:
    async for _ in run:
        pass


# ------------------------------------------------------------------------------------- two jobs with one folder


class Unharmed:
    """Nobody is killed."""

    def tick(self, job: str) -> None:
        """It lives on."""


def do_jobs(root: Path) -> None:
    config = lives.config(root, STEPS, 1, Rollover.KEEP)
    write_group, write_batch, commit_weights = Folder.write_group, Folder.write_batch, Folder.commit_weights

    def group(folder: Folder, found: Any) -> None:
        write_group(folder, found)
        mark(root, f"group {found.id}")

    def batch(folder: Folder, step: int, ids: tuple[int, ...]) -> None:
        write_batch(folder, step, ids)
        mark(root, f"batch {step} {' '.join(map(str, ids))}")

    def weights(folder: Folder, step: int, stats: Any) -> None:
        commit_weights(folder, step, stats)
        mark(root, f"version {step}")

    async def both() -> None:
        training = lives.train(config, cast(lives.Reaper, Unharmed()))
        await asyncio.gather(training, lives.generate(config, set(), set()))

    with mock.patch.multiple(Folder, write_group=group, write_batch=batch, commit_weights=weights):
        virtual.run(both())


# --------------------------------------------------------------------------------------------- what goes wrong


@contextmanager
def batch_first() -> Iterator[None]:
    """A batch is named before its groups are there."""
    late: list[tuple[Folder, Any]] = []
    write_group, write_batch = Folder.write_group, Folder.write_batch

    def batch(folder: Folder, step: int, ids: tuple[int, ...]) -> None:
        write_batch(folder, step, ids)
        while late:
            write_group(*late.pop())

    with mock.patch.multiple(Folder, write_group=lambda *given: late.append(given), write_batch=batch):
        yield


@contextmanager
def stats_last() -> Iterator[None]:
    """A version is there before what training it came to."""
    commit = Folder.commit_weights

    def weights(folder: Folder, step: int, stats: Any) -> None:
        commit(folder, step, None)
        if stats is not None:
            from rollyard.exchange import folder as module

            module.write_whole(folder._stats(step), module._packed(module.TRAINED.dump_python((stats,), mode="json")))

    with mock.patch.object(Folder, "commit_weights", weights):
        yield


@contextmanager
def row_first() -> Iterator[None]:
    """A checkpoint is named before it is there."""
    late: list[tuple[Path, ...]] = []
    put, commit = checkpoints._commit, Journal.commit_checkpoint

    def named(written: Journal, *given: Any) -> Future[None]:
        done = commit(written, *given)
        done.result(60)
        put(*late.pop())
        return done

    with (
        mock.patch.object(checkpoints, "_commit", lambda *paths: late.append(paths)),
        mock.patch.object(Journal, "commit_checkpoint", named),
    ):
        yield


@contextmanager
def prune_first() -> Iterator[None]:
    """Older checkpoints are deleted before the newest is named."""
    put = checkpoints._commit

    def committed(draft: Path, target: Path, metrics: Path) -> None:
        put(draft, target, metrics)
        keep_newest(RunFolder(metrics.parent), KEEP)

    with mock.patch.object(checkpoints, "_commit", committed):
        yield


@contextmanager
def nothing() -> Iterator[None]:
    yield


ORDERS: dict[str, Callable[[], Any]] = {
    "run:order=row_first": row_first,
    "run:order=prune_first": prune_first,
    "jobs:order=batch_first": batch_first,
    "jobs:order=stats_last": stats_last,
}


def main(top: Path, names: Sequence[str]) -> None:
    os.fsync = tagging(os.fsync)
    connect = sqlite3.connect
    for name in names:
        what, _, fault = name.partition(":")
        root = top / name
        root.mkdir()
        sqlite3.connect = lambda *given, at=root, wrong=fault, **named: connect(*given, factory=watched(at, wrong), **named)
        with mock.patch.object(journal, "FLUSH_S", 0.0), ORDERS.get(name, nothing)():
            {"run": do_run, "jobs": do_jobs}[what](root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
