"""The checkpoints of a run: what becomes of them when one is written, and which of them a run can go on from.

    checkpoint folder    written beside its place, with what is in it noted, to the disk, renamed
    checkpoint row       named in the journal, in one transaction with everything before it
    checkpoint pruned    all but the newest few are deleted

Whatever ends a run in between, the last one that was named is whole. What is not named is removed when a run is resumed.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rollyard.durable import check_whole, commit_folder, remove_folder, seal, sync
from rollyard.errors import CheckpointError, ConfigError, DurableError, JournalError
from rollyard.journal.folder import CHECKPOINTS, RunFolder, age, is_checkpoint, keep_newest
from rollyard.journal.journal import SLOW, SLOW_S
from rollyard.protocols.training import Learner
from rollyard.texts import visible
from rollyard.types import WeightVersion
from rollyard.watch.recorder import Recorder

At = Callable[[str], None]  # told `before NAME` and `after NAME` of what is done


class Checkpoints:
    """Those of one life of a run.

    Args:
        folder: of the run.
        recorder: keeps the journal that names them.
        keep: the newest that stay.
        life: of the run.
        at: told each step.
    """

    def __init__(self, folder: RunFolder, recorder: Recorder, keep: int, life: int, at: At | None = None) -> None:
        self._folder, self._recorder, self._keep, self._life, self._at = folder, recorder, keep, life, at
        self._committing: asyncio.Future[None] | None = None
        self._naming: tuple[WeightVersion, asyncio.Future[None]] | None = None

    async def write(self, learner: Learner, version: WeightVersion, cursor: int, counters: Mapping[str, object]) -> None:
        """What the learner has, as the newest checkpoint.

        Raises CheckpointError or TrainError when it cannot be written, JournalError when it cannot be named.

        Args:
            cursor, counters: see `Journal.commit_checkpoint`.
        """
        if await self._named(version):
            return
        target = self._folder.checkpoint(version.step, self._life)
        draft = target.with_name(f".{target.name}.draft-{secrets.token_hex(4)}")  # one that was given up may still be written
        with self._told("checkpoint folder"):
            try:
                written = await learner.save(draft)
            except CheckpointError as error:  # the name of a draft says nothing to people
                raise CheckpointError(str(error).replace(str(draft), str(target))) from error
            if written == draft:
                await self._committed(draft, target)
        with self._told("checkpoint row"):
            named = target.relative_to(self._folder.path) if written == draft else written
            row = self._recorder.checkpoint(version, str(named), cursor, counters)
            naming = asyncio.ensure_future(asyncio.to_thread(_wait, row))
            self._naming = version, naming
            await asyncio.shield(naming)
        with self._told("checkpoint pruned"):
            try:
                await asyncio.to_thread(keep_newest, self._folder, self._keep)
            except OSError as error:  # the new one is safe
                told = f"an older checkpoint cannot be deleted, which is tried again with the next one: {error}"
                warnings.warn(visible(told), RuntimeWarning, stacklevel=2)

    async def _named(self, version: WeightVersion) -> bool:
        """Has it a name already? A row that is being written is written whatever becomes of whoever waits for it."""
        if self._naming is None:
            return False
        last, naming = self._naming
        await asyncio.wait((naming,))
        return last == version and naming.exception() is None

    async def _committed(self, draft: Path, target: Path) -> None:
        """It goes on whatever becomes of whoever waits for it; what was committed for nobody makes room."""
        if self._committing is not None:
            await asyncio.wait((self._committing,))
        self._committing = asyncio.ensure_future(asyncio.to_thread(_commit, draft, target, self._folder.metrics))
        await asyncio.shield(self._committing)

    @contextmanager
    def _told(self, name: str) -> Iterator[None]:
        if self._at is not None:
            self._at(f"before {name}")
        yield
        if self._at is not None:
            self._at(f"after {name}")


def _wait(row: Future[None]) -> None:
    """Raises JournalError."""
    try:
        row.result(SLOW_S)
    except TimeoutError:
        raise JournalError(SLOW) from None


def _commit(draft: Path, target: Path, metrics: Path) -> None:
    """Raises CheckpointError. The metrics of its steps are on the disk, too, once it is."""
    try:
        if target.exists():  # it was given up before it had a name
            remove_folder(target)
        seal(draft)
        commit_folder(draft, target)
        if metrics.exists():
            sync(metrics)
            sync(metrics.parent)
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)  # gone already when all went well; else it is in the way of the next


@dataclass(slots=True)
class Whole:
    """Says of each checkpoint that the journal names whether it is whole, and remembers those that should be.

    It is asked from the newest to the oldest, up to one that is whole. Those that were not kept are older than any that is
    there, so it is never asked for one of them, unless no other is left.

    Args:
        folder: of the run.
        begun: the step where each life that changed anything began.
    """

    folder: Path
    begun: Mapping[int, int] = field(default_factory=dict)
    passed: list[str] = field(default_factory=list)  # what is wrong with each that is not whole

    def __call__(self, name: str) -> bool:
        if not is_checkpoint(name):
            self.passed.append(f"the journal names {name!r}, which is no checkpoint of the run")
            return False
        if not (self.folder / name).is_dir():
            step, life = age(Path(name))
            if not any(later > life and begun < step for later, begun in self.begun.items()):  # else that life deleted it
                self.passed.append(f"{self.folder / name} is not there any more")
            return False
        try:
            check_whole(self.folder / name)
        except DurableError as error:
            self.passed.append(str(error))
            return False
        return True

    def tell(self, version: WeightVersion) -> None:
        """That newer ones are not, and the run begins with this one.

        Raises ConfigError when none is: beginning anew is another run.
        """
        if self.passed and not version.step:
            more = f", and of {len(self.passed) - 1} older ones none is left" if len(self.passed) > 1 else ""
            problem = f"the run has no whole checkpoint any more: {self.passed[0]}{more}"
            remedy = "put one back as it was written; or begin a new run, with another --out or --name"
            raise ConfigError(visible(problem), where=str(self.folder / CHECKPOINTS), remedy=visible(remedy))
        for problem in self.passed:
            told = f"{problem}; the run goes on from version {version.step} instead"
            warnings.warn(visible(told), RuntimeWarning, stacklevel=2)


def clear(folder: RunFolder, named: str, unnamed: Sequence[Path] = ()) -> None:
    """Delete whatever is newer than the one that the run goes on from: it has no name, or is not whole.

    Args:
        named: that one, relative to the run's folder; empty: none.
        unnamed: of them those that stay, under another name: else they would count as the newest.
    """
    for found in unnamed:
        commit_folder(found, found.with_name(f"unnamed-{secrets.token_hex(4)}-{found.name}"))
    for found in folder.checkpoints():
        if not named or age(found) > age(Path(named)):
            remove_folder(found)
