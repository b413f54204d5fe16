"""Publisher, evidence and handoff of a trainer in another process, as the run sees them; the other ends are in `host`.

All raise WeightSyncError when the trainer does not answer in time, and TrainerLost when it is gone: it is no engine that
others could stand in for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollyard.errors import EngineLost, RollyardError, TimeLimitExceeded, TrainerLost, TrainError, WeightSyncError
from rollyard.events import EngineId
from rollyard.protocols.processes import Channel
from rollyard.protocols.weights import Answers, Handoff
from rollyard.types import Baseline, Finding, Handed, Judged, Manifest, Probed, Sent, WeightVersion
from rollyard.weights import wire


class Line:
    """Calls to a trainer.

    Args:
        channel: closed by whoever owns it.
        limit_s: seconds that an answer may take.
    """

    def __init__(self, channel: Channel, limit_s: float) -> None:
        self._channel, self._limit_s = channel, limit_s

    async def call(self, name: str, content: bytes = b"") -> bytes:
        try:
            return await self._channel.call(name, content, limit_s=self._limit_s)
        except TimeLimitExceeded as error:
            raise WeightSyncError(f"the trainer is late: {error}") from error
        except EngineLost as error:
            raise _gone(error) from error
        except RollyardError as error:
            if type(error) is not RollyardError:
                raise
            raise TrainError(f"the trainer failed: {error}") from error  # with what nobody raises on purpose

    def tell(self, name: str, content: bytes) -> None:
        try:
            self._channel.tell(name, content)
        except EngineLost as error:
            raise _gone(error) from error


def _gone(error: EngineLost) -> TrainerLost:
    return TrainerLost(f"the trainer is lost: {error}")


class RemotePublisher:
    """Implements `protocols.Publisher` over a channel.

    Args:
        channel: the line to the trainer's process.
        limit_s: seconds that an offer, or its delivery, may take.
    """

    def __init__(self, channel: Channel, limit_s: float) -> None:
        self._line = Line(channel, limit_s)

    async def publish(self, version: WeightVersion, engines: Sequence[EngineId]) -> Manifest:
        content = wire.OFFER.dump_json((version, tuple(engines)))
        return wire.MANIFEST.validate_json(await self._line.call("weights.publish", content))

    async def again(self, engines: Sequence[EngineId]) -> Manifest:
        return wire.MANIFEST.validate_json(await self._line.call("weights.again", wire.ENGINES.dump_json(tuple(engines))))

    async def deliver(self) -> Sent | None:
        return wire.SENT.validate_json(await self._line.call("weights.deliver"))

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        self._line.tell("weights.taken", wire.TAKEN.dump_json((engine, version)))

    def lost(self, engine: EngineId) -> None:
        self._line.tell("weights.lost", engine.encode())

    def close(self) -> None:
        """What it holds is given back in the trainer's process, when that ends."""


class RemoteEvidence:
    """Implements `protocols.TrainerEvidence` over a channel.

    Args:
        channel: the line to the trainer's process.
        limit_s: seconds that one look at the trainer's model may take.
    """

    def __init__(self, channel: Channel, limit_s: float) -> None:
        self._line = Line(channel, limit_s)

    async def prompts(self) -> tuple[tuple[int, ...], ...]:
        return wire.PROMPTS.validate_json(await self._line.call("evidence.prompts"))

    async def published(self, version: WeightVersion, engines: Sequence[EngineId]) -> None:
        await self._line.call("evidence.published", wire.OFFER.dump_json((version, tuple(engines))))

    async def check(self, engine: EngineId, answers: Answers) -> Probed:
        content = wire.ANSWERED.dump_json((engine, tuple(answers)))
        return wire.PROBED.validate_json(await self._line.call("evidence.check", content))[0]

    async def begin(self, answers: Mapping[EngineId, Answers]) -> Baseline:
        return wire.BASELINE.validate_json(await self._line.call("evidence.begin", _dumped(answers)))[0]

    async def move(self, attempt: int, names: Sequence[str]) -> None:
        await self._line.call("evidence.move", wire.MOVE.dump_json((attempt, tuple(names))))

    async def judge(self, answers: Mapping[EngineId, Answers]) -> Judged:
        return wire.JUDGED.validate_json(await self._line.call("evidence.judge", _dumped(answers)))[0]

    async def restore(self) -> None:
        await self._line.call("evidence.restore")

    async def returned(self, answers: Mapping[EngineId, Answers]) -> Mapping[EngineId, Finding]:
        return wire.FINDINGS.validate_json(await self._line.call("evidence.returned", _dumped(answers)))

    async def record(self, version: WeightVersion, folder: Path) -> None:
        """Written by the other process: the path has to mean the same there."""
        await self._line.call("evidence.record", wire.RECORD.dump_json((version, str(folder))))


class RemoteHandoff:
    """Implements `protocols.Handoff` over a channel.

    Args:
        channel: the line to the trainer's process.
        limit_s: seconds that each part may take.
    """

    def __init__(self, channel: Channel, limit_s: float) -> None:
        self._line = Line(channel, limit_s)

    async def give(self, version: WeightVersion, to: str) -> Manifest:
        return wire.MANIFEST.validate_json(await self._line.call("handoff.give", wire.GIVE.dump_json((version, to))))

    async def given(self) -> None:
        await self._line.call("handoff.given")

    async def take(self, manifest: Manifest) -> Handed:
        return wire.HANDED.validate_json(await self._line.call("handoff.take", wire.MANIFEST.dump_json(manifest)))


async def hand_over(giving: Handoff, taking: Handoff, version: WeightVersion, to: str, retries: int = 0) -> Handed:
    """Raises WeightSyncError when it failed once more than `retries` times; the side that takes has what it had then.

    Args:
        to: the name of the side that takes.
    """
    for left in reversed(range(1 + retries)):
        try:
            return await _hand_over(giving, taking, version, to)
        except WeightSyncError:
            if not left:
                raise
    raise AssertionError("it was tried")


async def _hand_over(giving: Handoff, taking: Handoff, version: WeightVersion, to: str) -> Handed:
    """Both sides at once, until neither is at it any more."""
    manifest = await giving.give(version, to)
    handed, given = await asyncio.gather(taking.take(manifest), giving.given(), return_exceptions=True)
    for outcome in (handed, given):
        if isinstance(outcome, BaseException):
            raise outcome
    assert isinstance(handed, Handed)
    return handed


def _dumped(answers: Mapping[EngineId, Answers]) -> bytes:
    return wire.ANSWERS.dump_json({engine: tuple(each) for engine, each in answers.items()})
