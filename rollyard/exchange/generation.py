"""The generation job's side of an exchange: to the run, it is what learns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple, Unpack

from rollyard.errors import ExchangeError
from rollyard.events import Drop, Finish, Instruction, Keep
from rollyard.exchange.agreed import Agreed, agree
from rollyard.exchange.folder import Folder, Job
from rollyard.exchange.waiting import Waiting
from rollyard.lives import GroupsRecovered
from rollyard.types import DropReason, Group, TrainStats, WeightVersion

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Action = Callable[[Any], Coroutine[Any, Any, None]]


class Generation:
    """Implements `protocols.Learner` by leaving batches in the folder and waiting for the versions that come of them.

    `open`, then `begin`; `close` at the end.

    Args:
        path: of the folder.
        limit_s: seconds that the training job may take for anything.
    """

    def __init__(self, path: Path, limit_s: float) -> None:
        self.folder = Folder(path)
        self._waiting = Waiting(self.folder, Job.GENERATION, limit_s)
        self._version = WeightVersion(0)
        self._writing: dict[int, asyncio.Task[None]] = {}  # groups and drops, by id
        self._doing: set[asyncio.Future[Any]] = set()  # on threads
        self._there: set[int] = set()  # groups that an earlier life wrote
        self._batches: dict[int, tuple[int, ...]] = {}
        self.recovered = GroupsRecovered(())
        self.actions: dict[type[Instruction], Action] = {Keep: self._keep, Drop: self._drop}

    def open(self, own: Agreed) -> frozenset[int]:
        """Take the folder. Returns the ids of prompts that are not to be asked again: taken or dropped.

        Raises ConfigError when another job has it, or it belongs to another config; ExchangeError when it cannot be used.
        """
        folder = self.folder
        folder.make()
        folder.seats[Job.GENERATION].take(Job.GENERATION)
        agree(folder, Job.GENERATION, own)
        folder.clear(Job.GENERATION)
        self._batches, dropped = folder.batches(), folder.dropped()
        for id_ in folder.groups() & dropped:
            folder.remove_group(id_)
        return frozenset(dropped.union(*self._batches.values()))

    async def begin(self, steps: int) -> WeightVersion:
        """Wait for a version; then what was left of an earlier life is in `recovered`.

        Args:
            steps: that there will be; more than there were to be before means that the run goes on.
        """
        step, pending = await self._waiting.until(self._newest, f"version {max(self._batches, default=0)}")
        self._version = WeightVersion(step)
        done = await self._do(self.folder.done)
        if done is not None and step < steps:
            await self._do(self.folder.go_on)
        taken = {id_ for ids in self._batches.values() for id_ in ids}
        groups = await self._do(lambda: [self.folder.group(id_) for id_ in sorted(self.folder.groups() - taken)])
        self._there = {group.id for group in groups}
        self.recovered = GroupsRecovered(tuple(groups), (pending,) if pending else ())
        return self._version

    def _newest(self) -> tuple[int, tuple[Group, ...]] | None:
        """The newest version, and the batch that was left for it; held, so that it is not deleted meanwhile."""
        step = self.folder.newest()
        if step is None or step < max(self._batches, default=0):  # there was one; who lost it trains it again
            return None
        self.folder.write_offered(step)
        try:
            self.folder.check_weights(step)
            pending = tuple(self.folder.group(id_) for id_ in self._batches.get(step, ()))
        except ExchangeError:
            if self.folder.newest() == step:
                raise
            return None  # it was trained, and deleted, while it was read
        return (step, pending) if step in self.folder.versions() else None

    # ----------------------------------------------------------------------------------------- as a learner

    @property
    def version(self) -> WeightVersion:
        return self._version

    @property
    def waiting(self) -> str:
        """What is waited for, in words; empty when that is not long ago."""
        return self._waiting.text

    def stop(self, cause: str) -> None:
        """Wait for no version any more: `learn` raises GivenUp. The batch stays, and is trained without this job."""
        self._waiting.give_up(cause)

    async def learn(self, step: int, groups: Sequence[Group]) -> TrainStats:
        """Leave the batch, and wait for the version that was trained on it. Raises ExchangeError."""
        ids = tuple(group.id for group in groups)
        if self._batches.get(step) != ids:
            assert step not in self._batches, "a batch never changes"
            await asyncio.gather(*(self._writing[id_] for id_ in ids if id_ not in self._there))
            await self._do(self.folder.write_batch, step, ids)
            self._batches[step] = ids
            for id_ in ids:
                self._writing.pop(id_, None)
        stats = await self._waiting.until(lambda: self._stats(step + 1), f"version {step + 1}")
        self._version = WeightVersion(step + 1)
        return stats

    def _stats(self, step: int) -> TrainStats | None:
        """Of the version that is waited for, None as long as that may come. Raises ExchangeError when it will not."""
        ended = self.folder.done()  # looked at first: a version that comes meanwhile is found below
        if step in self.folder.versions():
            return self.folder.stats(step)
        if ended is not None and ended < step:
            raise ExchangeError(f"the training job has ended with version {ended}: its run.steps is less than this job's")
        return None

    async def settle(self) -> WeightVersion:
        """What the training job does is its own."""
        return self._version

    async def save(self, folder: Path) -> Path:
        """The version's folder is its checkpoint."""
        return self.folder.weights(self._version.step)

    # ----------------------------------------------------------------------------------------------- records

    async def _keep(self, keep: Keep) -> None:
        if not keep.recovered:  # whatever an earlier life wrote of it was too old
            self._there.discard(keep.group.id)
            await self._write(keep.group.id, self._do(self.folder.write_group, keep.group))

    async def _drop(self, drop: Drop) -> None:
        """A prompt that left for good. One that was live when the run was stopped is asked again."""
        if drop.member is None and drop.reason is not DropReason.STOPPED:
            await self._write(drop.group, self._dropped(drop, self._writing.get(drop.group)))

    async def _dropped(self, drop: Drop, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        await self._do(self.folder.write_drop, drop.group, drop.reason, drop.cause)
        await self._do(self.folder.remove_group, drop.group)

    async def _write(self, id_: int, work: Coroutine[Any, Any, None]) -> None:
        """It goes on whatever becomes of whoever waits for it."""
        self._writing[id_] = asyncio.create_task(work)
        await asyncio.shield(self._writing[id_])

    async def _do(self, call: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """On a thread. It is over before the folder is left, whatever becomes of whoever waits for it."""
        doing = asyncio.ensure_future(asyncio.to_thread(call, *args))
        self._doing.add(doing)
        doing.add_done_callback(self._doing.discard)
        return await asyncio.shield(doing)

    async def close(self, finish: Finish) -> None:
        """Whatever was begun is written; others may have the folder. The end of the run is told to the training job."""
        while self._doing or any(not task.done() for task in self._writing.values()):
            await asyncio.gather(*self._writing.values(), *self._doing, return_exceptions=True)  # who waited was told
        try:
            if not (finish.failed or finish.stopped):
                self.folder.write_done(self._version.step, finish.cause)
        finally:
            self.folder.seats[Job.GENERATION].leave(finish.cause)
