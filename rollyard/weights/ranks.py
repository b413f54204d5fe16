"""The sides of one trainer that is several ranks with a part of the model each: all take part, rank 0 sends and answers.

Publishing collects one whole tensor after the other on rank 0; evidence is a forward pass, and so gathers layers on all
ranks. Both are asked of all ranks at once (`Together`), since a rank that is not asked is waited for by the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from rollyard.errors import RanksApart, WeightSyncError
from rollyard.events import EngineId
from rollyard.protocols.weights import Answers, Evidence, Publisher
from rollyard.types import Baseline, Finding, Judged, Manifest, Probed, Sent, WeightVersion
from rollyard.weights.words import named

T = TypeVar("T")


class Together(Protocol):
    """All ranks at once, after they have met. Raises what began it when one fails; they meet anew then."""

    async def __call__(self, calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]: ...


class RanksPublisher:
    """Implements `protocols.Publisher`.

    Args:
        ranks: each rank's own, in their order. What they hold is given back by whoever made them.
        together: asks them all at once.
    """

    def __init__(self, ranks: Sequence[Publisher], together: Together) -> None:
        self._ranks, self._first, self._together = tuple(ranks), ranks[0], together

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        """Raises WeightSyncError, also when ranks lost each other, and TrainerLost when one is gone."""
        try:
            return (await self._together([partial(rank.publish, version, engines) for rank in self._ranks]))[0]
        except RanksApart as error:  # they meet anew, and nothing has changed
            raise WeightSyncError(f"{named(version)} was not collected: {error}") from error

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        return await self._first.again(engines)

    async def deliver(self) -> Sent | None:
        return await self._first.deliver()

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        self._first.taken(engine, version)

    def lost(self, engine: EngineId) -> None:
        self._first.lost(engine)

    def close(self) -> None:
        """Nothing of its own to give back."""


class RanksEvidence:
    """Implements `protocols.Evidence`. All ranks draw rank 0's conclusions, so that all do the same next.

    Args:
        ranks: each rank's own, in their order.
        together: asks them all at once.
    """

    def __init__(self, ranks: Sequence[Evidence], together: Together) -> None:
        self._ranks, self._first, self._together = tuple(ranks), ranks[0], together

    async def prompts(self) -> tuple[tuple[int, ...], ...]:
        return await self._first.prompts()

    async def published(self, version: WeightVersion, engines: Sequence[EngineId]) -> None:
        await self._together([partial(rank.published, version, engines) for rank in self._ranks])

    async def check(self, engine: EngineId, answers: Answers) -> Probed:
        return await self._first.check(engine, answers)

    async def begin(self, answers: Mapping[EngineId, Answers]) -> Baseline:
        return (await self._together([partial(rank.begin, answers) for rank in self._ranks]))[0]

    async def move(self, attempt: int, names: Sequence[str]) -> None:
        await self._together([partial(rank.move, attempt, names) for rank in self._ranks])

    async def judge(self, answers: Mapping[EngineId, Answers]) -> Judged:
        return (await self._together([partial(rank.judge, answers) for rank in self._ranks]))[0]

    async def restore(self) -> None:
        """Each by itself: this is asked for also when they cannot meet any more."""
        for outcome in await asyncio.gather(*(rank.restore() for rank in self._ranks), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def returned(self, answers: Mapping[EngineId, Answers]) -> Mapping[EngineId, Finding]:
        return await self._first.returned(answers)
