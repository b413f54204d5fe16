"""The folder that two jobs share: what lies where, who writes it, and how it is read.

    agreed/JOB.json          what each job's config says about what both must agree on
    generation.lock          who is at work: held by the job while it lives
    training.lock
    groups/ID.json           a finished group, from when it is complete until it was trained        generation
    dropped/ID.json          a prompt that left without being trained, and why                      generation
    batches/STEP.json        the groups of the batch that trains version STEP, in order             generation
    offered.json             the version that engines may be reading                                generation
    weights/VERSION/         a Hugging Face folder; beside it the trainer's state, what was trained
                             (stats.json), and what the trainer computes with it                    training
    done.json                nothing more will be trained                                           both

What begins with a dot is not whole yet, or being deleted. Everything else is whole, and never changes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from rollyard.errors import ExchangeError
from rollyard.exchange.files import Seat, clear_drafts, commit_folder, remove_folder, write_whole
from rollyard.types import DropReason, Group, TrainStats

NAME = re.compile(r"\d{6,}")
STATS = "stats.json"
# A record alone would not listen to the config: it goes as a tuple of one.
GROUP = TypeAdapter(tuple[Group], config=ConfigDict(ser_json_inf_nan="constants"))
TRAINED = TypeAdapter(tuple[TrainStats], config=ConfigDict(ser_json_inf_nan="constants"))


class Job(StrEnum):
    """Who writes what."""

    GENERATION = "generation"
    TRAINING = "training"

    @property
    def other(self) -> Job:
        return Job.TRAINING if self is Job.GENERATION else Job.GENERATION


WRITES = {Job.GENERATION: ("groups", "dropped", "batches"), Job.TRAINING: ("weights",)}


class Folder:
    """All paths, and what is read and written there. Calls block; all of them raise ExchangeError for what they cannot do.

    Args:
        path: of the folder; both jobs may see it under different names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seats = {job: Seat(path / f"{job}.lock") for job in Job}

    def make(self) -> None:
        """Make the parts of it that are not there."""
        try:
            for part in ("agreed", *(part for parts in WRITES.values() for part in parts)):
                (self.path / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ExchangeError(f"{self.path} cannot be used: {error}") from error

    def clear(self, job: Job) -> None:
        """Delete what this job had begun to write when it was killed."""
        for part in WRITES[job]:
            clear_drafts(self.path / part)

    # --------------------------------------------------------------------------------------------- generation

    def write_group(self, group: Group) -> None:
        write_whole(self._group(group.id), _packed(GROUP.dump_python((group,), mode="json")))

    def group(self, id_: int) -> Group:
        return GROUP.validate_python(_unpacked(self._group(id_)))[0]

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
        return tuple(_unpacked(path)["groups"]) if path.exists() else None

    def batches(self) -> dict[int, tuple[int, ...]]:
        """All of them, by the version that each trains."""
        return {step: tuple(_unpacked(self._batch(step))["groups"]) for step in sorted(self._ids("batches"))}

    def write_offered(self, step: int) -> None:
        """From now on engines may read this version, and no other."""
        write_whole(self.path / "offered.json", _packed({"version": step}))

    def offered(self) -> int | None:
        path = self.path / "offered.json"
        return int(_unpacked(path)["version"]) if path.exists() else None

    # ----------------------------------------------------------------------------------------------- training

    def weights(self, step: int) -> Path:
        """Where a version is, once it is whole."""
        return self.path / "weights" / f"{step:06d}"

    def draft(self, step: int) -> Path:
        """Where a version is put together."""
        return self.path / "weights" / f".{step:06d}.draft"

    def commit_weights(self, step: int, stats: TrainStats | None) -> None:
        """What lies in the draft is the version, and this is what training it came to."""
        if stats is not None:
            write_whole(self.draft(step) / STATS, _packed(TRAINED.dump_python((stats,), mode="json")))
        commit_folder(self.draft(step), self.weights(step))

    def stats(self, step: int) -> TrainStats:
        """What training version `step - 1` into `step` came to."""
        return TRAINED.validate_python(_unpacked(self.weights(step) / STATS))[0]

    def versions(self) -> list[int]:
        """Versions that are whole, oldest first."""
        return sorted(int(path.name) for path in (self.path / "weights").iterdir() if NAME.fullmatch(path.name))

    def newest(self) -> int | None:
        return max(self.versions(), default=None)

    def prune(self, keep: int, begun: int, trained: Iterable[int] | None = None) -> None:
        """Delete all but the newest `keep` versions, the one on offer, and groups that the newest has learnt from.

        Args:
            begun: the version that the training job began with stays too: it takes configuration and tokenizer from there.
            trained: batches whose groups may still be there; None: any.
        """
        versions, offered, groups = self.versions(), self.offered(), self.groups()
        for step in versions[:-keep]:
            if step not in (offered, begun):
                remove_folder(self.weights(step))
        for step in (self._ids("batches") if trained is None else trained) if groups else ():
            if step < versions[-1]:
                for id_ in groups.intersection(self.batch(step) or ()):
                    self.remove_group(id_)

    # --------------------------------------------------------------------------------------------------- both

    def write_done(self, step: int, cause: str) -> None:
        """Nothing will be trained after version `step`."""
        write_whole(self.path / "done.json", _packed({"version": step, "cause": cause}))

    def done(self) -> int | None:
        """The last version there will be; None while that is open."""
        path = self.path / "done.json"
        return int(_unpacked(path)["version"]) if path.exists() else None

    def go_on(self) -> None:
        """More is to be trained after all."""
        (self.path / "done.json").unlink(missing_ok=True)

    def _group(self, id_: int) -> Path:
        return self.path / "groups" / f"{id_}.json"

    def _batch(self, step: int) -> Path:
        return self.path / "batches" / f"{step:06d}.json"

    def _ids(self, part: str) -> Iterator[int]:
        return (int(path.stem) for path in (self.path / part).glob("[0-9]*.json"))


def _packed(record: Any) -> bytes:
    return json.dumps(record).encode()  # ASCII: also what is no whole character has a place in it


def _unpacked(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ExchangeError(f"{path} cannot be read: {error}") from error
