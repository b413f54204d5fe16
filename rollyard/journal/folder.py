"""The folder of a run: resolved config, metrics, journal, checkpoints, report."""

from __future__ import annotations

import fcntl
import os
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from rollyard.config import Config
from rollyard.durable import remove_folder, write_file, write_folder
from rollyard.errors import ConfigError

CONFIG, METRICS, JOURNAL, CHECKPOINTS = "config.toml", "metrics.jsonl", "journal.sqlite", "checkpoints"
REPORT, TRACE = "report.json", "trace.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run's folder."""

    path: Path
    lock: int | None = None  # open file that keeps other runs out of the folder, while this run is going on
    fresh: bool = True  # no earlier life of the run was here

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def journal(self) -> Path:
        return self.path / JOURNAL

    @property
    def report(self) -> Path:
        return self.path / REPORT

    @property
    def trace(self) -> Path:
        return self.path / TRACE

    def checkpoint(self, step: int) -> Path:
        return self.path / CHECKPOINTS / f"step-{step:06d}"

    def remove(self) -> None:
        shutil.rmtree(self.path)

    def release(self) -> None:
        """Let other runs have the folder."""
        if self.lock is not None:
            os.close(self.lock)


def folder_of(config: Config) -> RunFolder:
    """Where the run's folder is or will be."""
    return RunFolder(Path(config.run.out) if config.run.out else Path("runs") / config.run.name)


def _check_apart(path: Path, shared: str) -> None:
    """The run's folder may be replaced, and what two jobs share may not."""
    own, other = path.resolve(), Path(shared).resolve()
    if shared and (own == other or own in other.parents or other in own.parents):
        problem = f"{shared} and the run's own folder {path} lie in each other"
        raise ConfigError(problem, where="exchange.folder", remedy="give a folder beside it")


def check_folder(config: Config) -> None:
    """Raises ConfigError when the folder cannot be made: it exists and may not be replaced, or is no run's folder."""
    try:
        _check_free(config)
    except (OSError, ValueError) as error:  # a name that is too long, a folder that may not be read, a zero byte
        problem = f"{folder_of(config).path} cannot be the run's folder: {error}"
        raise ConfigError(problem, where="run.out", remedy="give a folder that can be written") from None


def _check_free(config: Config) -> None:
    folder = folder_of(config)
    path = folder.path
    _check_apart(path, config.exchange.folder)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file", where="run.out", remedy="give another folder")
    if not path.is_dir() or not any(path.iterdir()) or goes_on(config):
        return
    if not config.run.overwrite:
        remedy = "give another --out or --name, or --overwrite to replace it"
        raise ConfigError(f"{path} exists already", where="run.out", remedy=remedy)
    if not folder.config.exists():
        problem = f"{path} holds something else than a run (no {CONFIG} in it), so it is not replaced"
        raise ConfigError(problem, where="run.out", remedy="give another folder")


def goes_on(config: Config) -> bool:
    """Is the folder that of an earlier life of this run? Only a run that shares its state with a training job has several."""
    path, shared = folder_of(config).config, config.exchange.folder
    if not shared or config.run.overwrite or not path.exists():
        return False
    try:
        before = tomllib.loads(path.read_text(encoding="utf-8")).get("exchange", {}).get("folder", "")
    except (tomllib.TOMLDecodeError, RecursionError):
        return False
    return Path(before).resolve() == Path(shared).resolve()


def make_folder(config: Config) -> RunFolder:
    """Make the run's folder, or take that of an earlier life, or replace an earlier one where the config says so.

    The resolved config is written there.

    The folder is locked until `release` or the end of the process, so two runs never write into one.

    Raises:
        ConfigError: see `check_folder`, or a run is going on there, or the folder cannot be written.
    """
    check_folder(config)
    path, content = folder_of(config).path, tomli_w.dumps(config.model_dump(mode="json"))
    try:
        if goes_on(config):
            lock = _lock(path)
            write_file(path / CONFIG, content.encode())
            return RunFolder(path, lock, fresh=False)
        if path.is_dir():
            _remove(path)
        lock = _make(path, content)
    except OSError as error:
        raise ConfigError(f"cannot be written: {error}", where="run.out", remedy="give a folder that can be written") from None
    return RunFolder(path, lock)


def _make(path: Path, content: str) -> int:
    """A new folder, held from before it is there."""
    locks = list[int]()

    def write(draft: Path) -> None:
        (draft / CHECKPOINTS).mkdir()
        (draft / CONFIG).write_text(content, encoding="utf-8")
        locks.append(_lock(draft))

    try:
        write_folder(path, write)
    except OSError:
        for handle in locks:
            os.close(handle)
        raise
    return locks[0]


def _lock(path: Path) -> int:
    """Raises ConfigError when another run holds the folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        remedy = "wait for it, or give another --out or --name"
        raise ConfigError(f"a run is going on in {path}", where="run.out", remedy=remedy) from None
    return handle


def _remove(path: Path) -> None:
    """Take the folder away, unless a run is going on in it."""
    handle = _lock(path)
    try:
        remove_folder(path)
    finally:
        os.close(handle)


def keep_newest(folder: RunFolder, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    found = sorted((folder.path / CHECKPOINTS).glob("step-*"))
    for old in found[:-keep]:
        remove_folder(old)
