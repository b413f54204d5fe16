"""The folder of a run: resolved config, metrics, journal, checkpoints, report."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from rollyard.config import Config
from rollyard.errors import ConfigError

CONFIG, METRICS, JOURNAL, REPORT, CHECKPOINTS = "config.toml", "metrics.jsonl", "journal.sqlite", "report.json", "checkpoints"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths inside one run's folder."""

    path: Path

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

    def checkpoint(self, step: int) -> Path:
        return self.path / CHECKPOINTS / f"step-{step:06d}"


def folder_of(config: Config) -> RunFolder:
    """Where the run's folder is or will be."""
    return RunFolder(Path(config.run.out) if config.run.out else Path("runs") / config.run.name)


def check_folder(config: Config) -> None:
    """Raises ConfigError when the folder cannot be made: it exists and may not be replaced, or is no run's folder."""
    folder = folder_of(config)
    path = folder.path
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file", where="run.out", remedy="give another folder")
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not config.run.overwrite:
        remedy = "give another --out or --name, or --overwrite to replace it"
        raise ConfigError(f"{path} exists already", where="run.out", remedy=remedy)
    if not folder.config.exists():
        problem = f"{path} holds something else than a run (no {CONFIG} in it), so it is not replaced"
        raise ConfigError(problem, where="run.out", remedy="give another folder")


def make_folder(config: Config) -> RunFolder:
    """Make the run's folder, replacing an earlier one where the config says so, and write the resolved config.

    Raises:
        ConfigError: see `check_folder`, or the folder cannot be written.
    """
    check_folder(config)
    folder = folder_of(config)
    try:
        if folder.path.is_dir():
            shutil.rmtree(folder.path)
        (folder.path / CHECKPOINTS).mkdir(parents=True)
        folder.config.write_text(tomli_w.dumps(config.model_dump(mode="json")), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error}", where="run.out", remedy="give a folder that can be written") from None
    return folder


def keep_newest(folder: RunFolder, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints."""
    found = sorted((folder.path / CHECKPOINTS).glob("step-*"))
    for old in found[:-keep]:
        shutil.rmtree(old)
