"""Asking an engine, and hearing all that it writes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from rollyard.events import Rollover, WakePart
from rollyard.protocols.rollouts import Engine
from rollyard.types import FinishReason, Request, RequestId, Sampling, Segment, VersionSpan, WeightVersion
from tests.engine.contract.makers import Maker, Served

PATIENCE_S = 40.0  # for what should come at once
_names = count()


@dataclass
class Heard:
    """What one request wrote."""

    segments: list[Segment] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for segment in self.segments for logprob in segment.logprobs]

    @property
    def finish(self) -> FinishReason | None:
        return self.segments[-1].finish if self.segments else None

    @property
    def problem(self) -> str:
        return self.segments[-1].problem

    @property
    def spans(self) -> list[VersionSpan]:
        """Neighbours of the same versions as one."""
        spans: list[VersionSpan] = []
        for segment in self.segments:
            span = VersionSpan(segment.version, segment.oldest_kv, len(segment.token_ids))
            if spans and spans[-1][:2] == span[:2]:
                spans[-1] = span._replace(tokens=spans[-1].tokens + span.tokens)
            elif span.tokens:
                spans.append(span)
        return spans


def ask(
    prompt: Sequence[int],
    max_tokens: int = 12,
    *,
    name: RequestId | None = None,
    seed: int = 0,
    written: Sequence[int] = (),
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    stop: tuple[str, ...] = (),
    ignore_eos: bool = False,
) -> Request:
    """A request with a name of its own; greedy unless a temperature is given."""
    sampling = Sampling(max_tokens, temperature, top_p, top_k, stop, ignore_eos)
    return Request(name or RequestId(next(_names), 0), tuple(prompt), sampling, seed, tuple(written))


class Talk:
    """One engine from its start to its end. Refuses, as the core would, what no engine may send.

    Args:
        served: the engine.
        maker: where it comes from.
        base: the folder of the model.
    """

    def __init__(self, served: Served, maker: Maker, base: Path) -> None:
        self.maker, self.base = maker, base
        self._served = served
        self.heard: dict[RequestId, Heard] = {}
        self._steps = count(10)  # above what others gave it before
        self._weights: Path | None = None
        self._news = asyncio.Event()
        self._listening = asyncio.create_task(self._listen())

    @property
    def engine(self) -> Engine:
        return self._served.engine

    def ask(self, *requests: Request) -> list[Heard]:
        """Hand requests over, all or none."""
        self.engine.generate(requests)
        for request in requests:
            self.heard[request.id] = Heard()
        return [self.heard[request.id] for request in requests]

    async def answers(self, *requests: Request) -> list[Heard]:
        heard = self.ask(*requests)
        await self.until(lambda: all(one.finish for one in heard))
        return heard

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what was heard fulfils the condition."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                if self._listening.done():
                    self._listening.result()
                    raise AssertionError("the engine says nothing more")
                self._news.clear()
                await self._news.wait()

    async def some(self, heard: Heard, tokens: int = 1) -> None:
        await self.until(lambda: len(heard.token_ids) >= tokens)

    async def change(self, folder: Path) -> WeightVersion:
        """Bring other weights in, under the next version. The engine must be idle or paused."""
        version = WeightVersion(next(self._steps))
        await self._served.change(folder, version)
        self._weights = folder
        return version

    async def spoil(self, folder: Path) -> None:
        """Something breaks on the way of the next version."""
        await self._served.spoil(folder, WeightVersion(next(self._steps)))

    async def calm(self) -> None:
        """Nothing runs, and the base weights are loaded, if any can be."""
        async with asyncio.timeout(PATIENCE_S):
            await self.engine.pause(Rollover.ABORT)
            if self.engine.capabilities.train and self._weights != self.base:
                await self.change(self.base)
            if self.engine.capabilities.sleep:
                await self.engine.wake(WakePart.CACHE)
            await self.engine.resume()
        await self.until(lambda: all(one.finish for one in self.heard.values()))
        self.heard.clear()

    async def ended(self) -> None:
        """The engine was closed: nothing more will come. Raises what was wrong in what came."""
        await asyncio.wait_for(asyncio.shield(self._listening), PATIENCE_S)

    async def leave(self) -> None:
        self._listening.cancel()
        await asyncio.wait((self._listening,))

    async def _listen(self) -> None:
        try:
            async for segments in self.engine.segments():
                for segment in segments:
                    one = self.heard[segment.request]
                    assert one.finish is None, "a segment after the last one"
                    assert len(segment.token_ids) == len(segment.logprobs)
                    assert segment.token_ids or segment.finish, "a segment that says nothing"
                    assert bool(segment.problem) == (segment.finish is FinishReason.ERROR)
                    one.segments.append(segment)
                self._news.set()
        finally:
            self._news.set()
