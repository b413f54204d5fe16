"""Several trainers' sides at once: who offered what to which engine, and who says what about which engine.

Usually one publisher serves all engines. Where hosts share parameters in place each has one of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rollyard.events import EngineId
from rollyard.protocols.weights import Answers, Evidence, Publisher
from rollyard.types import Baseline, Finding, Judged, Manifest, Probed, Sent, WeightVersion

T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Offered:
    """What came of an offer."""

    bytes_copied: int
    afresh: tuple[EngineId, ...]  # engines that were offered the parameters as they are now


class Offers:
    """What is on offer, by engine. All methods raise what a publisher raises, once none of them is at it any more.

    Args:
        publishers: that of each engine; the same one for several, or for all.
    """

    def __init__(self, publishers: Mapping[EngineId, Publisher]) -> None:
        self._publishers = dict(publishers)
        self._last: dict[Publisher, WeightVersion] = {}
        self._manifests: dict[EngineId, Manifest] = {}
        self._offering: tuple[Publisher, ...] = ()
        self._lost: set[EngineId] = set()  # since the last offer was begun

    def serve(self, engine: EngineId, publisher: Publisher) -> None:
        """From now on also this engine."""
        self._publishers[engine] = publisher

    async def offer(self, version: WeightVersion, engines: Sequence[EngineId], *, again: bool = False) -> Offered:
        """Publish `version` to these engines.

        Args:
            again: a publisher that offered this very version last offers the same bytes again.
        """
        served = _by(self._publishers, engines)
        self._lost.clear()
        self._offering = tuple(served)
        repeated = {publisher for publisher in served if again and self._last.get(publisher) == version}
        manifests = await _all(self._one(publisher, version, own, publisher in repeated) for publisher, own in served.items())
        afresh = tuple(engine for publisher, own in served.items() if publisher not in repeated for engine in own)
        return Offered(sum(manifest.bytes_copied for manifest in manifests), afresh)

    def has(self, engine: EngineId) -> bool:
        """Is something on offer to this engine?"""
        return engine in self._manifests

    def manifest(self, engine: EngineId) -> Manifest:
        """What the engine was offered last."""
        return self._manifests[engine]

    async def deliver(self) -> tuple[Sent, ...]:
        """Return once nothing of the last offer is on its way any more: what travelled, where that is known."""
        return tuple(sent for sent in await _all(publisher.deliver() for publisher in self._offering) if sent is not None)

    def taken(self, engine: EngineId, version: WeightVersion) -> None:
        self._publishers[engine].taken(engine, version)

    def lost(self, engine: EngineId) -> None:
        self._lost.add(engine)
        self._manifests.pop(engine, None)
        self._publishers[engine].lost(engine)

    async def _one(self, publisher: Publisher, version: WeightVersion, engines: Sequence[EngineId], again: bool) -> Manifest:
        engines = [engine for engine in engines if engine not in self._lost] or engines  # lost since they were named
        if again:  # should it fail, it is asked for again: what the trainer has now may be another version
            manifest = await publisher.again(engines)
        else:
            self._last.pop(publisher, None)  # should it fail, nobody knows what is there
            manifest = await publisher.publish(version, engines)
            self._last[publisher] = version
        self._manifests.update(dict.fromkeys(engines, manifest))
        return manifest


class ManyEvidence:
    """Implements `protocols.Evidence` for engines whose trainers have the same parameters, each its own copy.

    Args:
        evidence: that of each engine.
    """

    def __init__(self, evidence: Mapping[EngineId, Evidence]) -> None:
        self._evidence = dict(evidence)
        self._begun: tuple[Evidence, ...] = ()

    async def prompts(self) -> tuple[tuple[int, ...], ...]:
        return await next(iter(self._evidence.values())).prompts()

    async def published(self, version: WeightVersion, engines: Sequence[EngineId]) -> None:
        await _all(one.published(version, own) for one, own in _by(self._evidence, engines).items())

    async def check(self, engine: EngineId, answers: Answers) -> Probed:
        return await self._evidence[engine].check(engine, answers)

    async def begin(self, answers: Mapping[EngineId, Answers]) -> Baseline:
        served = _by(self._evidence, answers)
        self._begun = tuple(served)
        found = await _all(one.begin(_of(answers, own)) for one, own in served.items())
        return Baseline(found[0].tensors, {engine: nats for each in found for engine, nats in each.noise.items()})

    async def move(self, attempt: int, names: Sequence[str]) -> None:
        await _all(one.move(attempt, names) for one in self._begun)

    async def judge(self, answers: Mapping[EngineId, Answers]) -> Judged:
        found = await _all(one.judge(_of(answers, own)) for one, own in _by(self._evidence, answers).items())
        findings = {engine: finding for each in found for engine, finding in each.findings.items()}
        return Judged(findings, tuple(dict.fromkeys(name for each in found for name in each.unseen)))

    async def restore(self) -> None:
        await _all(one.restore() for one in self._begun)

    async def returned(self, answers: Mapping[EngineId, Answers]) -> Mapping[EngineId, Finding]:
        found = await _all(one.returned(_of(answers, own)) for one, own in _by(self._evidence, answers).items())
        return {engine: finding for each in found for engine, finding in each.items()}


async def _all(calls: Iterable[Awaitable[T]]) -> list[T]:
    """What all of them return, once none is under way any more. Raises what the first of those that failed raised."""
    found = []
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
        found.append(outcome)
    return found


def _by(served: Mapping[EngineId, K], engines: Iterable[EngineId]) -> dict[K, list[EngineId]]:
    """These engines by who serves them."""
    found: dict[K, list[EngineId]] = {}
    for engine in engines:
        found.setdefault(served[engine], []).append(engine)
    return found


def _of(answers: Mapping[EngineId, Answers], engines: Iterable[EngineId]) -> dict[EngineId, Answers]:
    return {engine: answers[engine] for engine in engines}
