"""An adapter on a server, with weights loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rollyard.engine.http import Client
from rollyard.engine.sglang.engine import SGLangEngine
from rollyard.model.architecture import Architecture
from rollyard.model.tokenizer import Tokenizer
from rollyard.types import Manifest, WeightVersion
from tests.engine.embedded.serving import Written
from tests.engine.sglang_double import Double

V0, V1 = WeightVersion(0), WeightVersion(1)


def adapter(url: str, folder: Path, keys: tuple[str, str] = ("", ""), **options: Any) -> SGLangEngine:
    limits = {"slots": 8, "window": 250, "start_s": 20.0, "sync_s": 20.0, "drain_s": 20.0}
    return SGLangEngine("engine-0", Client(url, keys), Architecture.from_folder(folder), Tokenizer(folder), **(limits | options))


async def bring(engine: SGLangEngine, folder: Path, version: WeightVersion) -> None:
    """The weights of a folder become `version` in the engine."""
    await engine.prepare(Manifest(version, (), 0, str(folder)))
    await engine.load(version)


@asynccontextmanager
async def attached(double: Double, folder: Path | None = None, **options: Any) -> AsyncIterator[SGLangEngine]:
    """A started adapter with version 0 acknowledged: the weights of `folder`, or of the server's own."""
    engine = adapter(double.url, folder or double.folder, **options)
    try:
        await engine.start()
        await bring(engine, folder or double.folder, V0)
        yield engine
    finally:
        await engine.close()


async def first_tokens(engine: SGLangEngine, least: int = 1) -> Written:
    """Hear until so many tokens came, of whichever request."""
    heard = Written()
    async with asyncio.timeout(20):
        async for segments in engine.segments():
            for segment in segments:
                heard.token_ids += segment.token_ids
                heard.logprobs += segment.logprobs
                heard.segments.append(segment)
            if len(heard.token_ids) >= least:
                return heard
    raise AssertionError("the engine closed too early")
