"""How weights get into every engine, and what it does before they are there and when they do not arrive."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollyard.errors import EngineError, WeightSyncError
from rollyard.events import Rollover
from rollyard.types import FinishReason, Manifest, VersionSpan, WeightVersion
from tests.engine.contract.model import LONG, PROMPTS, Model
from tests.engine.contract.talk import Talk, ask

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def check_tokens(talk: Talk, model: Model, version: WeightVersion | None) -> None:
    """It writes what these weights say, under this version."""
    requests = [ask(prompt, 12) for prompt in PROMPTS[:3]]
    for request, heard in zip(requests, await talk.answers(*requests), strict=True):
        assert heard.token_ids == model.greedy(request)
        assert {(segment.version, segment.oldest_kv) for segment in heard.segments} == {(version, version)}
        if talk.maker.model and talk.engine.capabilities.logprobs:
            assert heard.logprobs == pytest.approx(model.logprobs(request, heard.token_ids), abs=1e-3)


async def refuse_weights(talk: Talk) -> None:
    with pytest.raises((EngineError, WeightSyncError), match="weights"):
        await talk.engine.prepare(Manifest(WeightVersion(1), (), 0))
    with pytest.raises((EngineError, WeightSyncError), match="weights"):
        await talk.engine.load(WeightVersion(1))


async def test_new_weights_are_followed(talk: Talk, base: Path, trained: Path, model: Model, later: Model) -> None:
    if not talk.engine.capabilities.train:
        await refuse_weights(talk)
        return
    await check_tokens(talk, model, talk.engine.version)
    for folder, wanted in ((trained, later), (base, model), (base, model), (trained, later)):
        version = await talk.change(folder)
        assert talk.engine.version == version
        await check_tokens(talk, wanted, version)


async def test_a_load_that_fails_half_way_changes_nothing(talk: Talk, trained: Path, model: Model, later: Model) -> None:
    if not talk.engine.capabilities.train:
        await refuse_weights(talk)
        return
    before = talk.engine.version
    for _ in range(2):
        with pytest.raises(WeightSyncError):
            await talk.spoil(trained)
        assert talk.engine.version == before
        await check_tokens(talk, model, before)
    await talk.engine.pause(Rollover.DRAIN)
    with pytest.raises(WeightSyncError):
        await talk.spoil(trained)
    await talk.engine.resume()
    await check_tokens(talk, model, before)
    with pytest.raises(WeightSyncError):
        await talk.engine.load(WeightVersion(10**6))  # which nobody prepared
    assert talk.engine.version == before
    await check_tokens(talk, later, await talk.change(trained))


async def test_weights_do_not_change_under_requests_that_run(talk: Talk, trained: Path, model: Model, later: Model) -> None:
    if not talk.engine.capabilities.train:
        await refuse_weights(talk)
        return
    before = talk.engine.version
    requests = [ask(prompt, LONG, ignore_eos=True) for prompt in PROMPTS[:4]]
    written = talk.ask(*requests)
    await talk.some(written[0])
    with pytest.raises((EngineError, WeightSyncError)):
        await talk.engine.load(WeightVersion(10**6))
    await talk.engine.pause(Rollover.DRAIN)
    await asyncio.sleep(0)
    assert talk.engine.version == before
    for request, heard in zip(requests, written, strict=True):
        assert heard.spans == [VersionSpan(before, before, LONG)] and heard.token_ids == model.greedy(request)
    version = await talk.change(trained)
    await talk.engine.resume()
    await check_tokens(talk, later, version)


async def test_closing_cuts_what_runs(closing: Talk) -> None:
    engine = closing.engine
    written = closing.ask(*(ask(PROMPTS[name % 8], 200, ignore_eos=True, temperature=1.0) for name in range(24)))
    await closing.some(written[0])
    async with asyncio.timeout(20):
        await engine.close()
    await closing.ended()
    assert {heard.finish for heard in written} <= {FinishReason.ABORT, FinishReason.LENGTH}
    assert written[-1].finish is FinishReason.ABORT
    await engine.close()
    for call in (engine.pause(Rollover.ABORT), engine.resume(), engine.abort([])):
        with pytest.raises(EngineError, match="closed"):
            await call
    with pytest.raises((EngineError, WeightSyncError)):
        await engine.load(WeightVersion(1))
    with pytest.raises(EngineError, match="closed"):
        engine.generate([ask(PROMPTS[0])])
