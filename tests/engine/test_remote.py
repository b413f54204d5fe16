"""An engine at the other end of a line: what it adds to the contract suite is what can go wrong on the way."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rollyard import hosts
from rollyard.config import Config, EngineConfig, PlaceConfig
from rollyard.engine import wire
from rollyard.engine.capabilities import CAPABILITIES
from rollyard.engine.fake import FakeEngine, Script
from rollyard.engine.host import serve
from rollyard.engine.remote import RemoteEngine
from rollyard.errors import ConfigError, EngineError, EngineLost, RequestRejected, TimeLimitExceeded
from rollyard.events import Rollover
from rollyard.place.child import Child, launch
from rollyard.types import FinishReason, Manifest, Request, RequestId, Sampling, Segment, WeightVersion
from tests.place.lines import joined
from tests.tiny import tiny_folder

V0, V1 = WeightVersion(0), WeightVersion(1)
ROOT = Path(__file__).parents[2]


def ask(name: int, max_tokens: int = 3000, prompt: tuple[int, ...] = (1, 2), seed: int = 0) -> Request:
    return Request(RequestId(name, 0), prompt, Sampling(max_tokens), seed)


async def change(engine: RemoteEngine, version: WeightVersion) -> None:
    await engine.prepare(Manifest(version, (), 0))
    await engine.load(version)


@asynccontextmanager
async def linked(inner: FakeEngine, *, sync_s: float = 20.0, drain_s: float = 20.0) -> AsyncIterator[RemoteEngine]:
    near, far = await joined("the engine", "the run")
    serving = asyncio.create_task(serve(inner, far))
    engine = RemoteEngine("linked", near, inner.capabilities, start_s=20, sync_s=sync_s, drain_s=drain_s)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()
        await serving
        await far.close()


def endless(request: Request) -> Script:
    return Script((7,) * 4000)


async def heard(engine: RemoteEngine, count: int) -> dict[int, list[Segment]]:
    """All segments until so many requests have ended."""
    written: dict[int, list[Segment]] = {}
    async with asyncio.timeout(20):
        async for segments in engine.segments():
            for segment in segments:
                written.setdefault(segment.request.group, []).append(segment)
            if sum(parts[-1].finish is not None for parts in written.values()) == count:
                break
    return written


async def test_one_request_that_is_refused_does_not_harm_the_others() -> None:
    async with linked(FakeEngine(window=50)) as engine:
        await change(engine, V0)
        engine.generate([ask(0, 5), ask(1, 5, prompt=(1,) * 60), ask(2, 5)])
        written = await heard(engine, 3)
        refused = written[1][-1]
        assert refused.finish is FinishReason.ERROR and "can never run" in refused.problem and not refused.token_ids
        assert all(sum(len(part.token_ids) for part in written[name]) > 0 for name in (0, 2))
        engine.generate([ask(1, 5)])  # its name is free again
        assert (await heard(engine, 1))[1][-1].finish is not FinishReason.ERROR


@pytest.mark.parametrize("rollover", [Rollover.KEEP, Rollover.ABORT])
async def test_what_was_written_has_come_when_the_pause_is_answered(rollover: Rollover) -> None:
    inner = FakeEngine(script=endless, slots=50)
    async with linked(inner) as engine:
        await change(engine, V0)
        for _ in range(5):
            written = 0

            async def listen() -> None:
                nonlocal written
                async for segments in engine.segments():
                    written += sum(len(segment.token_ids) for segment in segments)

            before = inner.stats().generated_tokens
            listening = asyncio.create_task(listen())
            engine.generate([ask(name) for name in range(50)])
            await asyncio.sleep(0.02)
            await engine.pause(rollover)
            await asyncio.sleep(0)  # whoever listens has its turn
            assert written == inner.stats().generated_tokens - before == engine.stats().generated_tokens - before > 0
            await asyncio.sleep(0.05)
            assert written == inner.stats().generated_tokens - before
            await engine.pause(Rollover.ABORT)
            await engine.resume()
            await asyncio.sleep(0)
            listening.cancel()
            await asyncio.wait((listening,))


async def test_a_drain_that_takes_too_long_leaves_it_held_until_it_is_resumed() -> None:
    async with linked(FakeEngine(script=endless, token_s=0.001), drain_s=0.1) as engine:
        await change(engine, V0)
        engine.generate([ask(0)])
        with pytest.raises(TimeLimitExceeded, match="the engine did not answer pause"):
            await engine.pause(Rollover.DRAIN)
        with pytest.raises(EngineError, match="finishing what it has"):
            engine.generate([ask(1)])
        await engine.abort([RequestId(0, 0)])
        assert (await heard(engine, 1))[0][-1].finish is FinishReason.ABORT
        await engine.resume()
        engine.generate([ask(1, 5)])
        assert (await heard(engine, 1))[1][-1].finish is FinishReason.LENGTH


async def test_a_pause_that_is_refused_changes_nothing() -> None:
    async with linked(FakeEngine(script=endless, token_s=0.001)) as engine:
        await change(engine, V0)
        engine.generate([ask(0)])
        await engine.pause(Rollover.KEEP)
        with pytest.raises(EngineError, match="resume it first"):
            await engine.pause(Rollover.DRAIN)
        with pytest.raises(EngineError, match="paused"):
            engine.generate([ask(1)])
        await engine.resume()
        engine.generate([ask(1, 5)])
        assert (await heard(engine, 1))[1][-1].finish is FinishReason.LENGTH


async def test_a_load_that_comes_too_late_is_known_all_the_same() -> None:
    async with linked(FakeEngine(load_s=1.0), sync_s=0.4) as engine:
        await engine.prepare(Manifest(V0, (), 0))
        with pytest.raises(TimeLimitExceeded, match=r"the engine did not answer load within 0\.4 s"):
            await engine.load(V0)
        assert engine.version is None
        with pytest.raises(EngineError, match="acknowledged no weights"):
            engine.generate([ask(0)])
        await asyncio.sleep(1.0)
        assert engine.version == V0  # and tokens would say so


async def test_an_engine_that_is_gone() -> None:
    near, far = await joined("the engine", "the run")
    serving = asyncio.create_task(serve(FakeEngine(script=endless, token_s=0.001), far))
    engine = RemoteEngine("linked", near, CAPABILITIES["embedded"], start_s=20, sync_s=20, drain_s=20)
    await engine.start()
    await change(engine, V0)
    engine.generate([ask(0)])
    draining = asyncio.create_task(engine.pause(Rollover.DRAIN))
    await asyncio.sleep(0.05)
    await far.close()
    with pytest.raises(EngineLost, match="engine linked is lost: it ended"):
        await heard(engine, 1)
    with pytest.raises(EngineLost):
        await draining
    for call in (engine.abort([]), engine.pause(Rollover.ABORT), engine.prepare(Manifest(V1, (), 0)), engine.load(V1)):
        with pytest.raises(EngineLost, match="is lost"):
            await call
    with pytest.raises(EngineLost, match="is lost"):
        engine.generate([ask(1)])
    await asyncio.gather(serving, return_exceptions=True)
    await engine.close()
    await engine.close()


async def test_ids_are_checked_before_anything_is_sent() -> None:
    async with linked(FakeEngine(script=endless, token_s=0.001)) as engine:
        await change(engine, V0)
        engine.generate([ask(0)])
        for twins in ([ask(0)], [ask(1), ask(1)], [ask(2), ask(0)]):
            with pytest.raises(RequestRejected, match="same id"):
                engine.generate(twins)
        await engine.abort([RequestId(0, 0)])
        assert set(await heard(engine, 1)) == {0}


def test_numbers_cross_the_line_as_they_are() -> None:
    logprobs = (-0.1, -1e-300, -math.pi, -0.0, -123456.789012345678)
    segment = Segment(RequestId(-3, 2, 1), (0, 10**6), logprobs, WeightVersion(3, 1), V0, FinishReason.ERROR, "text with \u2028")
    (back,) = wire.SEGMENTS.validate_json(wire.SEGMENTS.dump_json((segment,)))
    assert back == segment and type(back.request) is RequestId and type(back.version) is WeightVersion
    odd = Segment(RequestId(0, 0), (1, 2), (math.nan, -math.inf), V0, V0)
    (back,) = wire.SEGMENTS.validate_json(wire.SEGMENTS.dump_json((odd,)))
    assert math.isnan(back.logprobs[0]) and back.logprobs[1] == -math.inf
    request = Request(RequestId(1, 2), (3,), Sampling(5, 0.1, stop=("\n", "é")), seed=2**64 - 1, written_ids=(4,), priority=-1)
    assert wire.REQUESTS.validate_json(wire.REQUESTS.dump_json((request,))) == (request,)


# --------------------------------------------------------------------------------------- with real children


@asynccontextmanager
async def scripted() -> AsyncIterator[tuple[RemoteEngine, Child]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = await launch("tests.engine.hosts:scripted", b"", name="engine far", environment=environment)
    engine = RemoteEngine("far", child, FakeEngine().capabilities, start_s=40, sync_s=20, drain_s=20)
    try:
        await engine.start()
        await change(engine, V0)
        yield engine, child
    finally:
        await engine.close()


async def test_an_engine_whose_process_is_killed_is_lost_within_two_seconds() -> None:
    async with scripted() as (engine, child):
        engine.generate([ask(0)])
        await anext(engine.segments())  # it writes
        began = time.monotonic()
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(EngineLost, match="engine far is lost: it was ended by signal 9"):
            await heard(engine, 1)
        assert time.monotonic() - began < 2


async def test_an_engine_that_fails_in_its_process_says_why() -> None:
    async with scripted() as (engine, _):
        engine.generate([ask(0, seed=13)])
        with pytest.raises(EngineLost, match=r"exit code 1(?s:.)*scripted to kill it"):
            await heard(engine, 1)


async def test_closing_an_engine_in_its_process_ends_what_runs() -> None:
    async with scripted() as (engine, child):
        engine.generate([ask(name) for name in range(6)])
        await engine.close()
        written = await heard(engine, 6)
        assert {parts[-1].finish for parts in written.values()} == {FinishReason.ABORT}
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)


async def test_a_mistake_that_only_the_engine_can_find_is_told_as_one(tmp_path: Path) -> None:
    config = Config(engine=EngineConfig(window=10**6), place=PlaceConfig(placement="separate", threads=1))
    engine = await hosts.launch_engine(config, "engine-0", tiny_folder(tmp_path))
    try:
        with pytest.raises(ConfigError) as mistake:
            await engine.start()
    finally:
        await engine.close()
    assert mistake.value.where == "engine.window" and "at most 256" in mistake.value.remedy


async def test_one_that_is_condemned_is_killed_unless_a_trainer_is_beside_it() -> None:
    for alone in (True, False):
        near, far = await joined("the engine", "the run")
        killed: list[str] = []
        near.kill = lambda killed=killed: killed.append("killed")  # type: ignore[attr-defined]
        serving = asyncio.create_task(serve(FakeEngine(script=endless, token_s=0.001), far))
        engine = RemoteEngine("linked", near, CAPABILITIES["embedded"], start_s=20, sync_s=20, drain_s=20, alone=alone)  # type: ignore[arg-type]
        await engine.start()
        await change(engine, V0)
        engine.generate([ask(0)])
        if alone:
            engine.condemn("it stood still")
            with pytest.raises(EngineLost, match="engine linked is lost: it stood still"):
                await heard(engine, 1)
        else:
            with pytest.raises(EngineError, match="shares its process with a trainer and cannot be taken out: it stood still"):
                engine.condemn("it stood still")
        assert killed == ["killed"] * alone
        await engine.close()
        await far.close()
        await asyncio.gather(serving, return_exceptions=True)
