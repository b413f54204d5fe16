"""The adapter, and a double of a server that it speaks to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollyard.engine.openai.client import OpenAIClient
from rollyard.engine.openai.engine import OpenAIEngine
from rollyard.engine.openai.limits import Limits
from rollyard.model.tokenizer import Tokenizer
from rollyard.types import Request
from tests.engine.embedded.serving import Reference, Written, answers
from tests.engine.openai_double import Double, double

PROMPTS = ((5, 6, 7), (30, 4, 9, 12, 40), (11,))
QUICK: dict[str, Any] = {"backoff_s": 0.01, "aside_s": 0.05, "total_s": 20.0}


@dataclass
class Bench:
    """An engine under test, and the double it speaks to."""

    engine: OpenAIEngine
    double: Double
    tokenizer: Tokenizer
    reference: Reference


class Benches:
    def __init__(self, folder: Path, reference: Reference) -> None:
        self._folder, self.reference = folder, reference
        self.tokenizer = Tokenizer(folder)

    def double(self, **offers: Any) -> AbstractAsyncContextManager[Double]:
        return double(self._folder, **offers)

    @asynccontextmanager
    async def open(
        self, *, window: int = 256, key: str = "", reads: bool = True, limits: dict[str, Any] | None = None, **offers: Any
    ) -> AsyncIterator[Bench]:
        async with self.double(window=window, key=key, **offers) as server:
            client = OpenAIClient([server.address], "tiny", key, Limits(**(QUICK | (limits or {}))))
            engine = OpenAIEngine("judge", client, self.tokenizer if reads else None)
            try:
                await engine.start()
                server.bodies.clear()
                yield Bench(engine, server, self.tokenizer, self.reference)
            finally:
                await engine.close()


async def one(bench: Bench, request: Request) -> Written:
    return (await answers(bench.engine, [request]))[request.id]


def first_change(text: str) -> int:
    """Where a text has another character for the first time: it ends the first such pair."""
    return next(at for at in range(1, len(text)) if text[at] != text[0])
