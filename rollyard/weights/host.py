"""Answers a run's calls beside the trainer: the other ends of `remote`.

Handlers are only registered: whoever owns the channel says that it is ready, closes it, and closes what is served.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollyard.protocols.processes import Channel
from rollyard.protocols.weights import Handoff, Publisher, TrainerEvidence
from rollyard.weights import wire


def serve(publisher: Publisher, evidence: TrainerEvidence | None, channel: Channel) -> None:
    """Handle `weights.*` and `evidence.*`; the latter not for a run that proves nothing."""
    _Publishing(publisher, channel)
    if evidence is not None:
        _Proving(evidence, channel)


def serve_handoff(handoff: Handoff, channel: Channel) -> None:
    """Handle `handoff.*`."""
    _HandingOver(handoff, channel)


class _Publishing:
    def __init__(self, publisher: Publisher, channel: Channel) -> None:
        self._publisher = publisher
        self._turn = asyncio.Lock()  # an offer that nobody waits for any more goes on here, and ends before the next
        for name in ("publish", "again", "deliver", "taken", "lost"):
            channel.handle(f"weights.{name}", getattr(self, f"_{name}"))

    async def _publish(self, content: bytes) -> bytes:
        version, engines = wire.OFFER.validate_json(content)
        async with self._turn:
            return wire.MANIFEST.dump_json(await self._publisher.publish(version, engines))

    async def _again(self, content: bytes) -> bytes:
        engines = wire.ENGINES.validate_json(content)
        async with self._turn:
            return wire.MANIFEST.dump_json(await self._publisher.again(engines))

    async def _deliver(self, content: bytes) -> bytes:
        return wire.SENT.dump_json(await self._publisher.deliver())

    async def _taken(self, content: bytes) -> bytes:
        self._publisher.taken(*wire.TAKEN.validate_json(content))
        return b""

    async def _lost(self, content: bytes) -> bytes:
        self._publisher.lost(content.decode())
        return b""


class _Proving:
    def __init__(self, evidence: TrainerEvidence, channel: Channel) -> None:
        self._evidence = evidence
        for name in ("prompts", "published", "check", "begin", "move", "judge", "restore", "returned", "record"):
            channel.handle(f"evidence.{name}", getattr(self, f"_{name}"))

    async def _prompts(self, content: bytes) -> bytes:
        return wire.PROMPTS.dump_json(await self._evidence.prompts())

    async def _published(self, content: bytes) -> bytes:
        await self._evidence.published(*wire.OFFER.validate_json(content))
        return b""

    async def _check(self, content: bytes) -> bytes:
        return wire.PROBED.dump_json((await self._evidence.check(*wire.ANSWERED.validate_json(content)),))

    async def _begin(self, content: bytes) -> bytes:
        return wire.BASELINE.dump_json((await self._evidence.begin(wire.ANSWERS.validate_json(content)),))

    async def _move(self, content: bytes) -> bytes:
        await self._evidence.move(*wire.MOVE.validate_json(content))
        return b""

    async def _judge(self, content: bytes) -> bytes:
        return wire.JUDGED.dump_json((await self._evidence.judge(wire.ANSWERS.validate_json(content)),))

    async def _restore(self, content: bytes) -> bytes:
        await self._evidence.restore()
        return b""

    async def _returned(self, content: bytes) -> bytes:
        return wire.FINDINGS.dump_json(await self._evidence.returned(wire.ANSWERS.validate_json(content)))

    async def _record(self, content: bytes) -> bytes:
        version, folder = wire.RECORD.validate_json(content)
        await self._evidence.record(version, Path(folder))
        return b""


class _HandingOver:
    def __init__(self, handoff: Handoff, channel: Channel) -> None:
        self._handoff = handoff
        for name in ("give", "given", "take"):
            channel.handle(f"handoff.{name}", getattr(self, f"_{name}"))

    async def _give(self, content: bytes) -> bytes:
        return wire.MANIFEST.dump_json(await self._handoff.give(*wire.GIVE.validate_json(content)))

    async def _given(self, content: bytes) -> bytes:
        await self._handoff.given()
        return b""

    async def _take(self, content: bytes) -> bytes:
        return wire.HANDED.dump_json(await self._handoff.take(wire.MANIFEST.validate_json(content)))
