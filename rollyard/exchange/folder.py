"""The folder that two jobs share: what lies where, who writes it, and how it is read.

    agreed/JOB.json          what each job's config says about what both must agree on
    generation.lock          who is at work: held by the job while it lives
    training.lock
    groups/ID.json           a finished group, from when it is complete until it was trained        generation
    dropped/ID.json          a prompt that left without being trained, and why                      generation
    batches/STEP.json        the groups of the batch that trains version STEP, in order             generation
    offered.json             the version that engines may be reading                                generation
    weights/VERSION/         a Hugging Face folder; beside it the trainer's state, what the trainer
                             computes with it, and at last what all that is (whole.json)            training
    stats/VERSION.json       what training it came to; this stays                                   training
    done.json                nothing more will be trained                                           both

What begins with a dot is not whole yet, or being deleted. Everything else is whole, and never changes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from rollyard.durable import check_whole, clear_drafts, commit_folder, is_whole, make_folder, remove_folder, seal
from rollyard.errors import ConfigError, DurableError, ExchangeError
from rollyard.exchange.files import Seat, read_whole, saying, write_whole
from rollyard.types import DropReason, Group, TrainStats

AGREED, WHERE = "agreed", "exchange.folder"
REMEDY = "delete this folder: training goes on from the version before it, if that is kept"
DIGITS = 6  # of a step in a name, at least
# A record alone would not listen to the config: it goes as a tuple of one.
GROUP = TypeAdapter(tuple[Group], config=ConfigDict(ser_json_inf_nan="constants"))
TRAINED = TypeAdapter(tuple[TrainStats], config=ConfigDict(ser_json_inf_nan="constants"))


@dataclass(frozen=True, slots=True)
class _Batch:
    step: int
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Version:
    version: int


BATCH, VERSION = TypeAdapter(_Batch), TypeAdapter(_Version)


class Job(StrEnum):
    """Who writes what."""

    GENERATION = "generation"
    TRAINING = "training"

    @property
    def other(self) -> Job:
        return Job.TRAINING if self is Job.GENERATION else Job.GENERATION


WRITES = {Job.GENERATION: ("groups", "dropped", "batches"), Job.TRAINING: ("weights", "stats")}


class Folder:
    """All paths, and what is read and written there. Calls block; all of them raise ExchangeError for what they cannot do.

    Args:
        path: of the folder; both jobs may see it under different names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seats = {job: Seat(path / f"{job}.lock") for job in Job}

    def make(self) -> None:
        """Make the parts of it that are not there. Raises ConfigError for a folder that is somebody else's."""
        with saying(f"{self.path} cannot be used"):
            refuse_foreign(self.path)
            for part in (AGREED, *(part for parts in WRITES.values() for part in parts)):
                make_folder(self.path / part)

    def clear(self, job: Job) -> None:
        """Delete what this job had begun to write when it was killed."""
        for part in WRITES[job]:
            with saying(f"{self.path / part} cannot be cleared"):
                clear_drafts(self.path / part)

    # --------------------------------------------------------------------------------------------- generation

    def write_group(self, group: Group) -> None:
        write_whole(self._group(group.id), _packed(GROUP.dump_python((group,), mode="json")))

    def group(self, id_: int) -> Group:
        return read_whole(self._group(id_), GROUP)[0]

    def groups(self) -> set[int]:
        """Ids of the finished groups that are there."""
        return set(self._ids("groups"))

    def remove_group(self, id_: int) -> None:
        self._group(id_).unlink(missing_ok=True)

    def write_drop(self, id_: int, reason: DropReason, cause: str) -> None:
        write_whole(self.path / "dropped" / f"{id_}.json", _packed({"reason": reason.value, "cause": cause}))

    def dropped(self) -> set[int]:
        """Ids of the prompts that left without being trained."""
        return set(self._ids("dropped"))

    def write_batch(self, step: int, groups: tuple[int, ...]) -> None:
        write_whole(self._batch(step), _packed({"step": step, "groups": groups}))

    def batch(self, step: int) -> tuple[int, ...] | None:
        """Ids of the groups that train version `step`, in order; None when it was not taken yet."""
        path = self._batch(step)
        return read_whole(path, BATCH).groups if path.exists() else None

    def batches(self) -> dict[int, tuple[int, ...]]:
        """All of them, by the version that each trains."""
        return {step: read_whole(self._batch(step), BATCH).groups for step in sorted(self._ids("batches", DIGITS))}

    def write_offered(self, step: int) -> None:
        """From now on engines may read this version, and no other."""
        write_whole(self.path / "offered.json", _packed({"version": step}))

    def offered(self) -> int | None:
        path = self.path / "offered.json"
        return read_whole(path, VERSION).version if path.exists() else None

    # ----------------------------------------------------------------------------------------------- training

    def weights(self, step: int) -> Path:
        """Where a version is, once it is whole."""
        return self.path / "weights" / f"{step:0{DIGITS}d}"

    def draft(self, step: int) -> Path:
        """Where a version is put together."""
        return self.path / "weights" / f".{step:0{DIGITS}d}.draft"

    def commit_weights(self, step: int, stats: TrainStats | None) -> None:
        """What lies in the draft is the version, and this is what training it came to."""
        if stats is not None:
            write_whole(self._stats(step), _packed(TRAINED.dump_python((stats,), mode="json")))
        with saying(f"{self.weights(step)} cannot be written"):
            seal(self.draft(step))
            commit_folder(self.draft(step), self.weights(step))

    def check_weights(self, step: int) -> None:
        """Raises ExchangeError for a version that was spoilt since it was written."""
        try:
            check_whole(self.weights(step))
        except DurableError as error:
            raise ExchangeError(f"{error} ({REMEDY})") from error

    def stats(self, step: int) -> TrainStats:
        """What training version `step - 1` into `step` came to."""
        return read_whole(self._stats(step), TRAINED)[0]

    def versions(self) -> list[int]:
        """Versions that are whole, oldest first."""
        with saying(f"{self.path} cannot be read"):
            found = [(_number(path.name, DIGITS), path) for path in (self.path / "weights").iterdir()]
            return sorted(step for step, path in found if step is not None and is_whole(path))

    def newest(self) -> int | None:
        return max(self.versions(), default=None)

    def prune(self, keep: int, begun: int, trained: Iterable[int] | None = None) -> None:
        """Delete all but the newest `keep` versions, the one on offer, and groups that all those have learnt from.

        Args:
            begun: the version that the training job began with stays too: it takes configuration and tokenizer from there.
            trained: batches whose groups may still be there; None: any.
        """
        versions, offered, groups = self.versions(), self.offered(), self.groups()
        for step in versions[:-keep]:
            if step not in (offered, begun):
                with saying(f"{self.weights(step)} cannot be deleted"):
                    remove_folder(self.weights(step))
        for step in (self._ids("batches", DIGITS) if trained is None else trained) if groups else ():
            if step < versions[-keep:][0]:  # should a newer one be lost, training goes on from there
                for id_ in groups.intersection(self.batch(step) or ()):
                    self.remove_group(id_)

    # --------------------------------------------------------------------------------------------------- both

    def write_done(self, step: int, cause: str) -> None:
        """Nothing will be trained after version `step`."""
        write_whole(self.path / "done.json", _packed({"version": step, "cause": cause}))

    def done(self) -> int | None:
        """The last version there will be; None while that is open."""
        path = self.path / "done.json"
        return read_whole(path, VERSION).version if path.exists() else None

    def go_on(self) -> None:
        """More is to be trained after all."""
        (self.path / "done.json").unlink(missing_ok=True)

    def _group(self, id_: int) -> Path:
        return self.path / "groups" / f"{id_}.json"

    def _batch(self, step: int) -> Path:
        return self.path / "batches" / f"{step:0{DIGITS}d}.json"

    def _stats(self, step: int) -> Path:
        return self.path / "stats" / f"{step:0{DIGITS}d}.json"

    def _ids(self, part: str, digits: int = 1) -> Iterator[int]:
        """Of files that have exactly the name that is written here; others are left alone."""
        with saying(f"{self.path / part} cannot be read"):
            names = [path.stem for path in (self.path / part).iterdir() if path.suffix == ".json"]
        return (id_ for id_ in (_number(name, digits) for name in names) if id_ is not None)


def check_place(path: Path) -> None:
    """Raises ConfigError when no exchange can be there: somebody else's folder, or one that cannot be made. Leaves nothing."""
    try:
        there = next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())
        if not there.is_dir():
            raise ConfigError(f"{there} is no folder", where=WHERE, remedy="give another folder")
        if there != path.absolute():
            TemporaryDirectory(dir=there).cleanup()
        elif not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"{path} cannot be written", where=WHERE, remedy="give a folder that can be written")
        refuse_foreign(path)
    except OSError as error:
        problem = f"{path} cannot be made: {error.strerror or error}"
        raise ConfigError(problem, where=WHERE, remedy="give a folder that can be written") from error


def refuse_foreign(path: Path) -> None:
    """Raises ConfigError for a folder that is not empty, and no exchange's."""
    if not path.is_dir() or not any(path.iterdir()):
        return
    if not (path / AGREED).is_dir():  # of all that is made there the first
        problem = f"{path} holds something else than an exchange (no {AGREED}/ in it)"
        raise ConfigError(problem, where=WHERE, remedy="give an empty folder, or one that is not there yet")


def _number(name: str, digits: int) -> int | None:
    """What a name says, if it is written as here."""
    number = int(name) if name.isascii() and name.isdecimal() else None
    return number if number is not None and name == f"{number:0{digits}d}" else None


def _packed(record: Any) -> bytes:
    return json.dumps(record).encode()  # ASCII: also what is no whole character has a place in it
