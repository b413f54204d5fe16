"""The folder of a run: resolved config, metrics, journal, checkpoints, report."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tomllib
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from rollyard.config import Config
from rollyard.durable import clear_drafts, is_full, remove_folder, write_file, write_folder
from rollyard.errors import ConfigError

CONFIG, METRICS, JOURNAL, CHECKPOINTS = "config.toml", "metrics.jsonl", "journal.sqlite", "checkpoints"
REPORT, TRACE, BEGAN = "report.json", "trace.json", "began.json"
TIMELINE = "timeline.json"
SCENARIO, PICTURE, LENGTHS = "scenario.toml", "timeline.svg", "lengths.json"  # of a run that was simulated
SCRATCH = ("weights", "canary")  # what travels to engines by the disk; it is of no use to the next life
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
NAMED = re.compile(r"step-(\d+)(?:-life-(\d+))?")


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
    def began(self) -> Path:
        """What the run began with, as far as its config does not say it."""
        return self.path / BEGAN

    @property
    def report(self) -> Path:
        return self.path / REPORT

    @property
    def trace(self) -> Path:
        return self.path / TRACE

    @property
    def timeline(self) -> Path:
        """What was done in all lives, coarser; kept while the run goes on."""
        return self.path / TIMELINE

    @property
    def scenario(self) -> Path:
        """Only a run that was simulated has it."""
        return self.path / SCENARIO

    @property
    def lengths(self) -> Path:
        """How often a completion had so many tokens. Only a run that was simulated has it: of others the journal says it."""
        return self.path / LENGTHS

    def checkpoint(self, step: int, life: int = 0) -> Path:
        """Of a version that this life of the run made. Another life may make that step again: the two are never confused."""
        return self.path / CHECKPOINTS / (f"step-{step:06d}" + (f"-life-{life}" if life else ""))

    def checkpoints(self) -> tuple[Path, ...]:
        """Those that are there, whether they are named in the journal or not; the oldest first."""
        above = self.path / CHECKPOINTS
        found = above.iterdir() if above.is_dir() else ()  # somebody may have deleted it
        return tuple(sorted((path for path in found if NAMED.fullmatch(path.name)), key=age))

    def write_config(self, config: Config) -> None:
        """What the run is given from now on."""
        write_file(self.config, _content(config))
        _keep_to_owner(self.config)

    def clear(self) -> None:
        """Delete what a life that was killed was writing, and what of it nobody needs."""
        (self.path / CHECKPOINTS).mkdir(exist_ok=True)
        clear_drafts(self.path)
        clear_drafts(self.path / CHECKPOINTS)
        for name in SCRATCH:
            shutil.rmtree(self.path / name, ignore_errors=True)

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
    if config.run.overwrite and path.is_symlink():
        raise ConfigError(f"{path} is a link, which is not replaced", where="run.out", remedy="give the folder that it leads to")
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
    path = folder_of(config).path
    try:
        if goes_on(config):
            folder = RunFolder(path, _lock(path), fresh=False)
            folder.clear()
            folder.write_config(config)
            return folder
        if path.is_dir():
            _remove(path)
        lock = _make(path, _content(config))
    except OSError as error:
        remedy = "make room there, or give another folder" if is_full(str(error)) else "give a folder that can be written"
        raise ConfigError(f"cannot be written: {error}", where="run.out", remedy=remedy) from None
    return RunFolder(path, lock)


def take_folder(path: Path) -> RunFolder:
    """That of an earlier life of a run, for its next one; nothing in it has changed. It is locked as `make_folder` locks it.

    Raises ConfigError when it is no run's, a run is going on there, or it cannot be used.
    """
    refuse_foreign(path)
    refuse_shared(path)
    try:
        return RunFolder(path, _lock(path, "wait for its end, or end it"), fresh=False)
    except OSError as error:
        remedy = "give a folder that can be read and written"
        raise ConfigError(f"it cannot be used: {error.strerror or error}", where=str(path), remedy=remedy) from None


def refuse_foreign(path: Path) -> None:
    """Raises ConfigError for what is no run's folder."""
    if not (path / CONFIG).is_file():
        problem = f"it is no run's folder (no {CONFIG} in it)" if path.is_dir() else "there is no such folder"
        raise ConfigError(problem, where=str(path), remedy="give the folder of a run, such as runs/NAME")


def refuse_shared(path: Path) -> None:
    """Raises ConfigError where another user may have put something: a config names code that the run loads, and its weights."""
    for found in (path, path / CONFIG):
        about = found.stat()
        if about.st_uid not in (os.getuid(), 0) or about.st_mode & OTHERS_WRITE:
            problem = "another user can write it, and so have a run of yours do anything"
            raise ConfigError(problem, where=str(found), remedy="look what is in it, then chown it to you and chmod go-w it")


def _keep_to_owner(path: Path) -> None:
    """No other user writes there, whatever this user's mask says. Who may read it, the mask does say."""
    path.chmod(stat.S_IMODE(path.stat().st_mode) & ~OTHERS_WRITE)


def _content(config: Config) -> bytes:
    return tomli_w.dumps(config.model_dump(mode="json")).encode()


def _make(path: Path, content: bytes) -> int:
    """A new folder, held from before it is there."""
    locks = list[int]()

    def write(draft: Path) -> None:
        _keep_to_owner(draft)
        (draft / CHECKPOINTS).mkdir()
        (draft / CONFIG).write_bytes(content)
        _keep_to_owner(draft / CONFIG)
        locks.append(_lock(draft))

    try:
        write_folder(path, write)
    except OSError:
        for handle in locks:
            os.close(handle)
        raise
    return locks[0]


def _lock(path: Path, remedy: str = "wait for it, or give another --out or --name") -> int:
    """Raises ConfigError when another run holds the folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
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
    for old in folder.checkpoints()[:-keep]:
        remove_folder(old)


def is_checkpoint(name: str) -> bool:
    """Is this, relative to a run's folder, the name of a checkpoint of it? What a journal says becomes a path by this alone."""
    folder, _, last = name.rpartition("/")
    return folder == CHECKPOINTS and NAMED.fullmatch(last) is not None


def age(checkpoint: Path) -> tuple[int, int]:
    """Of its folder: the step and the life that made it."""
    found = NAMED.fullmatch(checkpoint.name)
    assert found is not None, "it is named so"
    return int(found[1]), int(found[2] or 0)
