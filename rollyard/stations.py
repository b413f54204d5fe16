"""All stations of a run, and how engines come to it and leave it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from rollyard.episode.open import Player
from rollyard.events import EngineId
from rollyard.exchange.generation import Generation
from rollyard.protocols.devices import Spans
from rollyard.protocols.rollouts import Engine, PromptSource, Scorer
from rollyard.protocols.training import Trainer
from rollyard.protocols.weights import Evidence, Handoff, Publisher, TrainerEvidence
from rollyard.rollout.controller import Text
from rollyard.types import EngineStats, Prompt

Nodes = Callable[[], Mapping[str, Sequence[str]]]  # of a cluster: where each host was so far, the last one last, by its name


@dataclass(frozen=True, slots=True)
class Stations:
    """What a run is made of."""

    source: PromptSource
    held_out: tuple[Prompt, ...]
    scorer: Scorer
    text: Text
    window: int  # tokens of prompt and completion at most
    size: int  # bytes of one version of what travels to engines
    engines: dict[EngineId, Engine]
    trainers: Mapping[EngineId | None, Trainer]  # by half; under None the only one
    ranks: int  # parts of every batch
    publishers: dict[EngineId, Publisher]  # by the engine that each serves
    evidence: Evidence
    handoffs: Mapping[EngineId, Handoff]  # by half
    starts: tuple[Callable[[], Awaitable[None]], ...]
    launch: Callable[[EngineId, str], Awaitable[Engine]] | None = None  # by name and address, where engines can be lost alone
    release: Callable[[EngineId], Awaitable[None]] | None = None  # gives back the devices of one that left
    spans: Sequence[tuple[str, str, Spans]] = ()  # name, role and device of whatever the report accounts for
    nodes: Nodes = dict
    exchange: Generation | None = None  # where another job trains
    vocabulary: int = 0  # tokens have lower numbers; 0: nobody knows
    player: Player | None = None  # where prompts are played as episodes

    async def start(self) -> None:
        """Wait until all are ready. Raises EngineError or TrainError for one that cannot be."""
        await asyncio.gather(*(start() for start in self.starts))

    async def restart(self, engine: EngineId, keep: Callable[[EngineStats], None]) -> None:
        """A new engine in the place of one that was lost, whose totals are kept.

        Raises EngineError, or TimeLimitExceeded when it is not ready in time.
        """
        assert self.launch is not None, "it is not lost alone"
        lost = self.engines[engine]
        await lost.close()
        new = await self.launch(engine, "")
        keep(lost.stats())
        self.engines[engine] = new
        await self.engines[engine].start()

    async def add(self, engine: EngineId, url: str) -> Engine:
        """One more engine, or server; the trainer's first publisher serves it.

        Raises EngineError, ConfigError where there is no room, or TimeLimitExceeded when it is not ready in time.
        """
        assert self.launch is not None, "no engine comes alone"
        try:
            new = await self.launch(engine, url)
            try:
                await new.start()
            except BaseException:
                await new.close()
                raise
        except BaseException:
            await self._release(engine)
            raise
        self.engines[engine] = new
        self.publishers[engine] = next(iter(self.publishers.values()))
        return new

    async def remove(self, engine: EngineId, keep: Callable[[EngineStats], None]) -> None:
        """Close an engine, whose totals are kept. It is here until it is closed: the run may end meanwhile."""
        gone = self.engines[engine]
        await gone.close()
        keep(gone.stats())
        del self.engines[engine], self.publishers[engine]
        await self._release(engine)

    async def close_engines(self) -> None:
        """All that there are by now. Raises what the first of those that failed raised."""
        for met in await asyncio.gather(*(engine.close() for engine in self.engines.values()), return_exceptions=True):
            if isinstance(met, BaseException):
                raise met

    async def _release(self, engine: EngineId) -> None:
        if self.release is not None:
            await self.release(engine)


@dataclass(frozen=True, slots=True)
class Trainers:
    """What a job that only trains is made of."""

    trainer: Trainer
    ranks: int  # parts of every batch
    evidence: TrainerEvidence
    starts: tuple[Callable[[], Awaitable[None]], ...]
