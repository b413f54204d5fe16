"""Several trainers as one: data-parallel ranks, each with a part of every batch and the same parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from rollyard.errors import RanksApart, TrainerLost, TrainError
from rollyard.protocols.training import ValueTrainer
from rollyard.types import TrainBatch, TrainStats, WeightVersion

SETTLE_S = 1.0  # seconds that the others have to say what they met, once one has failed

T = TypeVar("T")


class Member(ValueTrainer, Protocol):
    """A trainer that can be one of several ranks, in this process or in another."""

    async def open(self, address: str, limit_s: float) -> str:
        """Of rank 0: a new place where the ranks can meet. Raises TrainError."""
        ...

    async def join(self, place: str, rank: int, size: int, limit_s: float) -> None:
        """Be one of the ranks from now on, instead of what it was before. Raises RanksApart when not all come in time."""
        ...


class TrainerGroup:
    """Implements `protocols.Trainer`. What one rank meets all meet; the error names the rank where it began.

    The ranks meet before the first step, and anew after every failure. A rank that is gone stays gone: whoever replaces
    it makes a new group, of trainers that all have the same state.

    Args:
        members: one for each rank, all with the same parameters. They are closed with the group.
        address: of the machine of rank 0, as the others reach it; empty: that one knows it.
        limit_s: seconds a rank may wait for the others: at the meeting, and at the end of its part of a batch.
        shards: each member has a part of the parameters, not a copy.
    """

    def __init__(self, members: Sequence[Member], address: str, limit_s: float, *, shards: bool = False) -> None:
        self._members, self._address, self._limit_s, self._shards = tuple(members), address, limit_s, shards
        self._version = members[0].version
        self._met = False
        self._turn = asyncio.Lock()

    @property
    def version(self) -> WeightVersion:
        return self._version

    async def train(self, shards: Sequence[TrainBatch]) -> TrainStats:
        """One optimizer step, a part of the batch for each rank.

        Raises:
            NonFinite: a loss or gradient of any part is NaN or infinite; all parameters are as before.
            TrainerLost: a rank's process is gone, or it alone did not come to the end in time.
            TrainError: whatever else a rank raised.
        """
        self._check(shards)
        found = await self.together([partial(each.train, [shard]) for each, shard in zip(self._members, shards, strict=True)])
        self._version = self._members[0].version
        return found[0]

    async def values(self, shards: Sequence[TrainBatch]) -> tuple[tuple[tuple[float, ...], ...], ...]:
        """See `protocols.ValueTrainer`: each rank values its part. Raises as `train` does."""
        self._check(shards)
        found = await self.together([partial(each.values, [shard]) for each, shard in zip(self._members, shards, strict=True)])
        return tuple(values for (values,) in found)

    async def settle(self) -> WeightVersion:
        """Raises TrainError when ranks ended at different versions: their parameters are torn."""
        found = set(await self._all([member.settle() for member in self._members]))
        if len(found) > 1:
            raise TrainError(f"ranks are at versions {' and '.join(str(version.step) for version in sorted(found))}")
        (self._version,) = found
        return self._version

    async def save(self, folder: Path) -> None:
        """By rank 0, to which the others bring their parts if they have any. Raises CheckpointError, or TrainerLost."""
        if self._shards:
            await self.together([partial(member.save, folder) for member in self._members])
        else:
            await self._members[0].save(folder)

    async def become(self, version: WeightVersion) -> None:
        await self._all([member.become(version) for member in self._members])
        self._version = version

    async def close(self) -> None:
        await asyncio.gather(*(member.close() for member in self._members))

    async def together(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
        """One call of each member, all at once, after they have met. One such thing at a time.

        Raises the first cause when one fails, with its rank; they meet anew before the next.
        """
        async with self._turn:
            if not self._met:
                await self._meet()
            self._met = False
            found = await self._all([call() for call in calls])
            self._met = True
            return found

    def _check(self, shards: Sequence[TrainBatch]) -> None:
        if len(shards) != len(self._members):
            raise TrainError(f"{len(self._members)} ranks train on as many parts of a batch, not on {len(shards)}")

    async def _meet(self) -> None:
        size = len(self._members)
        (place,) = await self._all([self._members[0].open(self._address, self._limit_s)]) if size > 1 else ("",)
        await self._all([member.join(place, rank, size, self._limit_s) for rank, member in enumerate(self._members)])

    async def _all(self, calls: Sequence[Awaitable[T]]) -> list[T]:
        """What all of them give. Raises the first cause when one fails; the others are not waited for then."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(pending, timeout=SETTLE_S)
            silent = [rank for rank, task in enumerate(tasks) if not task.done()]
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        failed = {rank: met for rank, met in enumerate(outcomes) if isinstance(met, BaseException) and rank not in silent}
        if failed:
            raise _first_cause(failed, silent, len(calls))
        return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


def _first_cause(failed: Mapping[int, BaseException], silent: Sequence[int], size: int) -> BaseException:
    """Which of the errors is no consequence of another, with its rank; as it is, when all ranks met the same."""
    rank, error = min(failed.items(), key=lambda item: (isinstance(item[1], RanksApart), not isinstance(item[1], TrainerLost)))
    if isinstance(error, RanksApart) and silent:
        ranks = " and ".join(map(str, silent))
        return TrainerLost(f"rank {ranks} did not answer: {error}")
    alike = len(failed) == size and len({str(each) for each in failed.values()}) == 1
    if alike or not isinstance(error, TrainError):
        return error
    return type(error)(f"rank {rank}: {error}")
